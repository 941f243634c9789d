"""Every way to change one field of a document, and whether the document still fits its schema afterwards.

That is reasoned here from what kind of field it is, and never asked of an implementation: it decides which code a
vector expects.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from vectors.documents import Json, digest

Path = tuple[str | int, ...]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{12}Z")

_CONSTANTS: Final = {"schema_id", "schema_version", "algorithm", "encoding", "truncated"}
# Fields of a closed set, with another member that no rule across fields forbids in our documents; None where each
# other member breaks one (an outcome without its error; an artifact of another type than its entry says).
_ANOTHER_MEMBER: Final[dict[str, dict[str, str] | None]] = {
    "from_state": {},
    "to_state": {},
    "artifact_type": None,
    "tool_class": {"write": "read"},
    "decision": {"APPROVE": "DENY", "DENY": "APPROVE"},
    "type": {"policy": "person"},
    "on_unknown_outcome": {"redispatch": "hold"},
    "outcome": None,
    "basis": {"answer": "reconciliation"},
    "result": {"answered": "interrupted"},
    "change": {"pinned": "quarantined", "announced": "retired"},
    "missed": {"one": "all"},
    "retention": {"keep": "delete_on_success"},
    "state": {"AUTHORIZED": "DENIED", "DENIED": "AUTHORIZED", "COMPLETED": "FAILED", "FAILED": "COMPLETED"},
}
_TEXTS: Final = {
    "intent",
    "rationale",
    "message",
    "data",
    "idempotency_key",
    "text",
    "note",
    "description",
}
_NULLABLE: Final = {
    "expires_at",
    "tool_definition_digest",
    "intent",
    "policy_digest",
    "rationale",
    "signature",
    "output",
    "ended_at",
    "description",
    "timeout_ms",
    "checkpoint_timeout_ms",
    "output_schema",
    "state_schema",
    "version",
}
# One field of each form gets all the misspellings of its form; the others of that form one each.
_THOROUGH: Final = {"prev_entry_digest", "executor_id", "requested_at", "server_id"}
# Under these, anything that is JSON fits.
_FREE: Final = {"arguments", "value", "definition", "input_schema", "input"}


@dataclass(frozen=True, slots=True)
class Change:
    """`document` is the original but for one field; `fits` says whether its schema still admits it."""

    name: str
    document: Json
    fits: bool


def spelled(path: Path) -> str:
    return "_".join(str(step) for step in path)


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value that holds no other, with the way to it."""
    members: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    if not members:
        yield path, value
    for step, member in members:
        yield from leaves(member, (*path, step))


def branches(value: object, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Every object of a document, itself first; not those in free-form places, where nothing is required."""
    if isinstance(value, dict):
        yield path, value
        for step, member in value.items():
            if step not in _FREE:
                yield from branches(member, (*path, step))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from branches(member, (*path, index))


def replaced(document: Json, path: Path, value: object) -> Json:
    changed = copy.deepcopy(document)
    parent: Any = changed
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return changed


def flipped_fields(document: Json) -> Iterator[Change]:
    """Each field with one byte (or its number, or its truth) changed."""
    for path, value in leaves(document):
        if value is None or value in ([], {}):
            continue  # no byte to flip; `nulled` and `filled` are the changes of these
        field = _field_of(path)
        name = f"{spelled(path)}_flipped"
        if isinstance(value, bool):
            yield Change(name, replaced(document, path, not value), field not in _CONSTANTS)
        elif isinstance(value, int):
            yield Change(name, replaced(document, path, value + 1), fits=True)
        else:
            closed = not _is_free(path) and (field in _CONSTANTS or field in _ANOTHER_MEMBER)
            yield Change(name, replaced(document, path, _flipped(str(value), field)), not closed)


def other_members(document: Json) -> Iterator[Change]:
    """Each field of a closed set with another of its members, where that alone breaks no rule."""
    for path, value in leaves(document):
        members = None if _is_free(path) else _ANOTHER_MEMBER.get(_field_of(path))
        if members is not None and isinstance(value, str):
            member = members.get(value)
            if _field_of(path) in ("from_state", "to_state"):
                member = "FAILED" if value != "FAILED" else "PENDING"
            if member is not None:
                yield Change(f"{spelled(path)}_{member.lower()}", replaced(document, path, member), fits=True)


def nulled_fields(document: Json) -> Iterator[Change]:
    """Each field set to null; those that may be null are still of another document than was hashed."""
    paths = dict.fromkeys(path[: depth + 1] for path, _ in leaves(document) for depth in range(len(path)))
    for path in paths:
        value: Any = document
        for step in path:
            value = value[step]
        if value is not None:
            fits = _field_of(path) in _NULLABLE or _field_of(path) == "value" or _is_free(path[:-1])
            yield Change(f"{spelled(path)}_null", replaced(document, path, None), fits)


def dropped_fields(document: Json) -> Iterator[Change]:
    """Each field left out; none is optional, what is unknown is said as null."""
    for path, branch in branches(document):
        for field in branch:
            changed = copy.deepcopy(document)
            parent: Any = changed
            for step in path:
                parent = parent[step]
            del parent[field]
            yield Change(f"without_{spelled((*path, field))}", changed, fits=False)


def unknown_fields(document: Json) -> Iterator[Change]:
    for path, _ in branches(document):
        where = f"_in_{spelled(path)}" if path else ""
        changed = replaced(document, (*path, "extra"), 1)
        yield Change(f"unknown_field{where}", changed, fits=False)


def misspelled_fields(document: Json) -> Iterator[Change]:
    """Each field with a value that is close to its form and outside it."""
    for path, value in leaves(document):
        field = _field_of(path)
        if _is_free(path) or field in _CONSTANTS or field in _ANOTHER_MEMBER:
            continue
        for how, wrong in _misspellings(value, field):
            yield Change(f"{spelled(path)}_{how}", replaced(document, path, wrong), fits=False)


def _misspellings(value: object, field: str) -> Iterator[tuple[str, object]]:
    is_thorough = field in _THOROUGH
    if isinstance(value, int):
        yield "negative", -1
        yield "as_text", str(value)
        yield "fraction", value + 0.5
        yield "beyond_2_to_the_53", 2**53
        yield "true", True
    elif not isinstance(value, str):
        return
    elif _DIGEST.fullmatch(value):
        yield "in_upper_case", value.upper()
        if is_thorough:
            yield "too_short", value[:-1]
            yield "with_a_final_newline", value + "\n"
    elif _ID.fullmatch(value):
        yield "of_uuid_version_4", value[:14] + "4" + value[15:]
        if is_thorough:
            yield "in_upper_case", value[:-1] + "A"
            yield "with_a_final_newline", value + "\n"
    elif _TIME.fullmatch(value):
        yield "in_month_13", value[:5] + "13" + value[7:]
        if is_thorough:
            yield "without_milliseconds", value[:19] + "Z"
            yield "with_an_offset", value[:-1] + "+00:00"
            yield "at_hour_24", value[:11] + "24" + value[13:]
            yield "with_a_final_newline", value + "\n"
    elif field == "idempotency_key":
        yield "empty", ""
        yield "too_long", "k" * 256
        yield "with_a_final_newline", value + "\n"
        yield "not_ascii", value + "é"
    elif field in _TEXTS:
        yield "as_number", 7
    else:
        yield "with_a_final_newline", value + "\n"
        if is_thorough:
            yield "empty", ""
            yield "with_a_space", value + " x"
            yield "not_ascii", value + "é"
            yield "too_long", "n" * 129


def _field_of(path: Path) -> str:
    names = [step for step in path if isinstance(step, str)]
    # A signature has a `value` too, and that one is not free-form.
    return "signature_value" if names[-2:] == ["signature", "value"] else names[-1]


def _is_free(path: Path) -> bool:
    return any(step in _FREE for step in path) and path[:2] != ("signature", "value")


def _flipped(text: str, field: str) -> str:
    """One byte changed to a neighbour of its own kind: 0 and 1, 2 and 3; a and b, c and d."""
    at = len(text) - 1
    if _TIME.fullmatch(text):
        at -= 1  # the Z is part of the form, the last millisecond is not
    elif field == "signature_value":
        at = 0  # its end is padding
    elif not text[at].isalnum():
        at -= 1
    byte = ord(text[at])
    neighbour = byte ^ 1 if text[at].isdigit() else ((byte - 1) ^ 1) + 1
    return text[:at] + chr(neighbour) + text[at + 1 :]


def resealed_digest(document: Json) -> str | None:
    """The digest of a changed document; None where it has no canonical form (an integer beyond 2^53)."""
    try:
        return digest(document)
    except ValueError:
        return None
