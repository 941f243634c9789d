"""Compare what stands in the database with what the migrations make, and say what to do about each difference.

`expected_schema.json` is generated (`make generate`) by migrating an empty database and reading its inventory. What a
promise rests on refuses a start. What only costs time, or lets another role read, is told and does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from app.postgres.inventory import Facts, Inventory
from app.postgres.migrate import packaged_migrations

OWNER_ROLE: Final = "tga_owner"
_NO_GRANT: Final = "no such grant"
_READING: Final = ("SELECT TO ", "USAGE TO ")
_MAKE_AGAIN: Final = "Find out who changed it and what was written since"
_VERIFY: Final = "then run `tga verify --all`."
# What is shown of an object that is missing or superfluous, first of all.
_TELLING: Final = {
    "column": ("type", "not null", "default"),
    "constraint": ("type", "columns", "expression", "references"),
    "index": ("unique", "method", "columns", "predicate"),
    "trigger": ("fires", "function", "when", "enabled"),
    "function": ("result", "language", "security"),
    "setting": ("value",),
    "rows": ("error",),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it must be, and what to do about it. `refuses`: no gateway starts on it."""

    what: str
    expected: str
    found: str
    remedy: str
    refuses: bool = True


@dataclass(frozen=True, slots=True)
class ExpectedSchema:
    """`source_sha256` is of the migrations and of the query, from which the rest was made."""

    source_sha256: str
    rule_tables: dict[str, list[str]]
    objects: Inventory


@cache
def expected_schema() -> ExpectedSchema:
    text = resources.files("app.postgres").joinpath("expected_schema.json").read_text("utf-8")
    document = json.loads(text)
    return ExpectedSchema(document["source_sha256"], document["rule_tables"], document["objects"])


def compare(expected: Inventory, found: Inventory) -> list[Problem]:
    """Every difference, those that refuse a start first; empty when all is as the migrations made it.

    What belongs to a table that is missing or is not ours is not listed beside it.
    """
    problems: list[Problem] = []
    for key in sorted(expected.keys() | found.keys()):
        wanted, there = expected.get(key), found.get(key)
        if wanted is None and there is not None:
            problems += _superfluous(key, there, expected)
        elif there is None and wanted is not None:
            problems += _missing(key, wanted, found)
        elif wanted is not None and there is not None and wanted != there:
            problems += _changed(key, wanted, there)
    return sorted(problems, key=lambda problem: not problem.refuses)


def _superfluous(key: str, facts: Facts, expected: Inventory) -> Iterator[Problem]:
    kind, _, name = key.partition(" ")
    if "of" in facts and not _has_owner(facts, expected):
        return
    if kind == "member":
        role = name.removesuffix(f" of {OWNER_ROLE}")
        what, remedy = f"{role} may act as {OWNER_ROLE}", f'REVOKE {OWNER_ROLE} FROM "{role}", unless it migrates.'
        yield Problem(what, "nobody but who migrates", role, remedy, refuses=False)
        return
    if kind == "rows":
        yield Problem(f"the rows of tga.{name} cannot be read", "rows", str(facts["error"]), "Grant SELECT on it.")
        return
    refuses = {
        "table": False,  # nothing of ours reads it; a child of a table of ours is found there
        "view": False,
        "sequence": False,
        "index": bool(facts.get("unique") or facts.get("expressions")),
        "setting": not name.startswith("search_path"),
        "other": not name.startswith("statistics object "),
        # Rules of a kind of stream that no migration knows judge no stream of ours.
        "row": "kind" not in facts or f"row stream_kinds ({facts['kind']})" in expected,
    }.get(kind, True)
    yield Problem(
        f"{_title(key, facts)} is none of ours",
        "nothing",
        _summary(kind, facts),
        f"Find out who made it and why; remove it: {_removal(kind, name, facts)}; {_VERIFY}",
        refuses=refuses,
    )


def _missing(key: str, facts: Facts, found: Inventory) -> Iterator[Problem]:
    kind, _, name = key.partition(" ")
    if "of" in facts and (not _has_owner(facts, found) or f"rows {facts['of']}" in found):
        return
    yield Problem(
        f"{_title(key, facts)} is missing",
        _summary(kind, facts),
        "nothing",
        f"{_MAKE_AGAIN}; make it again as in {_source(name)}; {_VERIFY}",
        refuses=_is_relied_on(kind, facts),
    )


def _changed(key: str, wanted: Facts, there: Facts) -> Iterator[Problem]:
    kind, _, name = key.partition(" ")
    title = _title(key, wanted)
    for fact in sorted(wanted.keys() | there.keys()):
        if wanted.get(fact) == there.get(fact):
            continue
        if fact == "grants":
            yield from _changed_grants(kind, name, title, wanted.get(fact, []), there.get(fact, []))
            continue
        remedy = f"{_MAKE_AGAIN}; make it again as in {_source(name)}; {_VERIFY}"
        if fact == "owner":
            remedy = f"{_statement('ALTER', kind, name)} OWNER TO {wanted[fact]}; {_VERIFY}"
        elif (kind, fact) == ("trigger", "enabled"):
            table, trigger = name.split(".", 1)
            remedy = f"ALTER TABLE tga.{table} ENABLE ALWAYS TRIGGER {trigger}; {_VERIFY}"
        yield Problem(
            f"{title} was changed: {fact}",
            _shown(wanted.get(fact, "nothing")),
            _shown(there.get(fact, "nothing")),
            remedy,
            refuses=_is_relied_on(kind, wanted, fact) or _is_relied_on(kind, there, fact),
        )


def _changed_grants(kind: str, name: str, title: str, wanted: Sequence[str], there: Sequence[str]) -> Iterator[Problem]:
    on = f"COLUMN tga.{name}" if kind == "column" else _statement("", kind, name).strip()
    for grant in sorted(set(there) - set(wanted)):
        privilege, _, grantee = grant.removesuffix(" WITH GRANT OPTION").partition(" TO ")
        remedy = f"REVOKE {privilege} ON {on} FROM {grantee}; {_VERIFY}"
        is_reading = grant.startswith(_READING) and not grant.endswith("OPTION")
        yield Problem(f"{title} was changed: grants", _NO_GRANT, grant, remedy, refuses=not is_reading)
    for grant in sorted(set(wanted) - set(there)):
        privilege, _, grantee = grant.partition(" TO ")
        remedy = f"GRANT {privilege} ON {on} TO {grantee}."
        yield Problem(f"{title} was changed: grants", grant, _NO_GRANT, remedy)


def _is_relied_on(kind: str, facts: Facts, fact: str | None = None) -> bool:
    """Whether a promise rests on it. An index that is not unique only makes things faster, and options only tune."""
    if kind == "index":
        return bool(facts.get("unique") or facts.get("expressions"))
    return not (kind == "table" and fact == "options")


def _has_owner(facts: Facts, inventory: Inventory) -> bool:
    return any(f"{kind} {facts['of']}" in inventory for kind in ("table", "view", "type"))


def _title(key: str, facts: Facts) -> str:
    kind, _, name = key.partition(" ")
    if kind == "function":
        return f"function tga.{name.partition('(')[0]}"
    if kind == "row":
        return f"{name.removeprefix(facts['of'] + ' ')} of tga.{facts['of']}".replace("(", "row (", 1)
    if kind == "index":
        return f"index {name} of tga.{facts['of']}"
    if "of" in facts:
        return f"{kind} {name.removeprefix(facts['of'] + '.')} of tga.{facts['of']}"
    if kind in ("schema", "role", "setting", "other"):
        return f"{kind} {name}"
    return f"{kind} tga.{name}"


def _summary(kind: str, facts: Facts) -> str:
    if kind == "row":
        return json.dumps({name: value for name, value in facts.items() if name != "of"})
    told = [_shown(facts[name], name) for name in _TELLING.get(kind, ()) if facts.get(name) not in (None, False)]
    return " ".join(told) or "it"


def _shown(value: Any, name: str = "") -> str:
    if isinstance(value, bool):
        return name if value and name else str(value).lower()
    if isinstance(value, list):
        shown = ", ".join(str(one) for one in value)
        return f"({shown})" if name == "columns" else shown
    return str(value)


def _statement(verb: str, kind: str, name: str) -> str:
    if kind == "schema":
        return f"{verb} SCHEMA {name}"
    return f"{verb} {kind.upper()} tga.{name}"


def _removal(kind: str, name: str, facts: Facts) -> str:
    if kind in ("trigger", "rule", "policy"):
        return f"DROP {kind.upper()} {name.removeprefix(facts['of'] + '.')} ON tga.{facts['of']}"
    if kind in ("constraint", "column"):
        return f"ALTER TABLE tga.{facts['of']} DROP {kind.upper()} {name.removeprefix(facts['of'] + '.')}"
    if kind == "row":
        return f"DELETE it FROM tga.{facts['of']}"
    if kind == "setting":
        return f"ALTER ROLE or ALTER DATABASE ... RESET {name.split()[0]}"
    if kind == "other":
        return f"DROP {name}"
    return _statement("DROP", kind, name)


def _source(name: str) -> str:
    """The last migration that names an object: where to read how it is made."""
    table, _, last = name.partition("(")[0].rpartition(".")
    for word in (last, table or last.partition("_")[0]):
        for migration in reversed(packaged_migrations()):
            if re.search(rf"\b{re.escape(word)}\b", migration.sql):
                return f"migration {migration.version:04}_{migration.name}.sql"
    return "the migrations"
