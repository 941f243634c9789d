"""The recorded documents as components of the OpenAPI document: `ToolEffect` is the contract of a tool_effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_SCHEMAS: Final = Path(__file__).resolve().parents[2] / "schemas" / "tga" / "v1"
_CONTRACTS: Final = ("action_request", "supervisor_decision", "tool_call", "tool_effect")
_ENTRIES: Final = ("execution_log_entry", "run_log_entry")


def component(name: str) -> dict[str, str]:
    """A reference to a component: for what is recorded, to its own contract."""
    return {"$ref": f"#/components/schemas/{name}"}


def recorded(name: str, *, may_be_missing: bool = False) -> dict[str, Any]:
    """The schema of a recorded document, byte for byte as it is stored."""
    if not may_be_missing:
        return component(_title(name))
    return {"anyOf": [component(_title(name)), {"type": "null"}]}


def load_contracts() -> dict[str, Any]:
    """The contracts of a trace's documents and of entries, by component; what refers within a file refers within its
    component."""
    found = {}
    for name in (*_CONTRACTS, *_ENTRIES):
        schema = json.loads((_SCHEMAS / f"{name}.schema.json").read_bytes())
        # With an id of its own its references would be looked for in itself, not in the document around it.
        for own in ("$schema", "$id"):
            del schema[own]
        if name in _ENTRIES:  # its digest is over the rest, and is sent beside it
            del schema["properties"]["entry_digest"]
            schema["required"].remove("entry_digest")
        found[_title(name)] = _moved(schema, _title(name))
    return found


def _title(name: str) -> str:
    return name.title().replace("_", "")


def _moved(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, name) for key, item in value.items()}
    if isinstance(moved.get("$ref"), str):
        moved["$ref"] = moved["$ref"].replace("#/", f"#/components/schemas/{name}/", 1)
    return moved
