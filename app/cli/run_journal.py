"""A run's journal as GET /v1/runs/{run_id}/checkpoints answers it, put together: what became of each operation."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from app.cli.client import GatewayClient, path_to
from app.domain.runs.paths import operation_of

Item = dict[str, Any]
_STEP: Final = re.compile(r"(\d+)(?::(\d+))?")


@dataclass(slots=True)
class Try:
    """One time that an operation was performed. `outcome` is None while it is open."""

    number: int
    attempt: int | None
    sequence_number: int  # of the entry that begins it, or that says all of it at once
    began_at: str
    input_digest: str
    request: dict[str, Any] | None = None
    intent_digest: str | None = None
    outcome: str | None = None
    value: dict[str, Any] | None = None
    joined: Any = None
    error: dict[str, Any] | None = None
    answered_by: dict[str, str] | None = None
    signed_with: str | None = None  # the id of the key, of a person's answer
    took_ms: int | None = None
    logs: list[dict[str, str]] = field(default_factory=list)
    source: str | None = None
    resume: str = "snapshot"
    level: int = 0  # how often its escalations were sent


@dataclass(slots=True)
class Operation:
    """What stands at one address. Its tries, in their order: the last is the one that counts."""

    path: str
    kind: str
    name: str
    tries: list[Try] = field(default_factory=list)

    @property
    def last(self) -> Try:
        return self.tries[-1]

    @property
    def depth(self) -> int:
        return self.path.count(".")


@dataclass(slots=True)
class Journal:
    """Operations by their address; all that concerns the run as a whole (`events`), in the journal's order."""

    operations: dict[str, Operation] = field(default_factory=dict)
    events: list[Item] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Items come in the journal's order. What an answer belongs to may stand before the first that was read."""
        match item["artifact_type"]:
            case "run_intent":
                self._operation(item).tries.append(_begun(item))
            case "run_checkpoint":
                tries = self._operation(item).tries
                if not tries or tries[-1].outcome is not None:
                    tries.append(_begun(item))
                _end(tries[-1], item)
                tries[-1].took_ms = item.get("duration_ms")
            case "run_answer":
                operation = self.operations.get(item.get("path", ""))
                if operation is not None and operation.last.outcome is None:
                    _end(operation.last, item)
                    operation.last.took_ms = apart_ms(operation.last.began_at, item["recorded_at"])
            case "run_escalation":
                operation = self.operations.get(item.get("path", ""))
                if operation is not None:
                    operation.last.level = item["level"]
                self.events.append(item)
            case _:
                self.events.append(item)

    def in_order(self) -> list[Operation]:
        """As the program performs them: by address, the outer operation before those inside it."""
        return sorted(self.operations.values(), key=lambda operation: place(operation.path))

    def first_entries(self) -> dict[str, int]:
        """By address: the entry with which the operation, or the first one inside it, stands on the journal."""
        first: dict[str, int] = {}
        for operation in self.operations.values():
            number, path = operation.tries[0].sequence_number, operation.path
            while path and first.get(path, number + 1) > number:
                first[path] = number
                path = operation_of(path.rpartition(".")[0])
        return first

    def _operation(self, item: Item) -> Operation:
        return self.operations.setdefault(item["path"], Operation(item["path"], item["kind"], item["name"]))


def place(path: str) -> list[tuple[int, int]]:
    """By this addresses are sorted: 3, 3.1, 3:1.1, 3:2.1, 4, 10."""
    return [(int(position), int(branch or 0)) for position, branch in _STEP.findall(path)]


def journal_of(items: Iterable[Item]) -> Journal:
    journal = Journal()
    for item in items:
        if item.get("path") or item["artifact_type"] not in ("run_intent", "run_checkpoint", "run_answer"):
            journal.add(item)
    return journal


def apart_ms(earlier: str, later: str) -> int:
    return round((datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds() * 1000)


async def read_journal(client: GatewayClient, run_id: str, *, after: int | None = None) -> AsyncIterator[Item]:
    """The journal after this entry, page by page: of a fork its source's first, under numbers up to 0."""
    path = path_to("v1", "runs", run_id, "checkpoints")
    while True:
        page = await client.get(path, after_seq=after)
        for item in page["items"]:
            if (item.get("value") or {}).get("tier") == "secret":
                item["joined"] = None  # opened for a key that may work, as an administrator's; not for a terminal
            yield item
        if page["next"] is None or not page["items"]:
            return
        after = page["next"]


def _begun(item: Item) -> Try:
    is_intent = item["artifact_type"] == "run_intent"
    return Try(
        item["try_number"],
        item.get("attempt"),
        item["sequence_number"],
        item["recorded_at"] if is_intent else item["started_at"],
        item["input_digest"],
        request=item.get("request"),
        intent_digest=item["artifact_digest"] if is_intent else None,
        source=item.get("source"),
    )


def _end(one: Try, item: Item) -> None:
    one.outcome = item["outcome"]
    one.value, one.joined, one.error = item.get("value"), item.get("joined"), item.get("error")
    one.answered_by, one.logs = item.get("answered_by"), item.get("logs") or []
    one.signed_with = (item.get("signature") or {}).get("key_id")
    one.source, one.resume = item.get("source") or one.source, item.get("resume") or "snapshot"
