"""What an attempt reads of its run's journal: in pages, as far as the program asks for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tga_sdk.draws import Drawers, Draws, ForkDraws, fork_salt
from tga_sdk.endings import Over, failure
from tga_sdk.journal import Begun, Ended, Journal
from tga_sdk.plain import tool_output

if TYPE_CHECKING:
    from tga_sdk.attempt import Attempt


class JournalReader:
    """Reads as far as the journal went when the run was leased (`leased`: the run as the gateway gave it). What others
    record later comes with the answers to the attempt's puts (`feed`)."""

    def __init__(self, attempt: Attempt, leased: dict[str, Any]) -> None:
        self.journal = Journal()
        self.fork_changes: list[dict[str, Any]] = []  # of the state, by the caller who forked the run; to be applied
        self._attempt = attempt
        self._first_seq: int = leased["first_seq"]
        self._leased_to: int = leased["sequence_number"]
        # A first attempt has nothing to replay.
        self._read_to: int = self._leased_to if attempt.number == 1 and self._first_seq == 0 else self._first_seq
        self._reading = asyncio.Lock()
        self._resumed_at: list[int] | None = None  # entries not yet read at which failed operations were reopened
        self._draw_salt = bytes.fromhex(leased["draw_salt"])
        self._drawers: Drawers | None = None

    @property
    def is_live(self) -> bool:
        """Whether the program has reached the journal's end."""
        return self._read_to >= self._leased_to

    async def look(self, path: str) -> Ended | Begun | None:
        """What stands at this address, whatever it is."""
        while True:
            found = self.journal.look(path)
            if isinstance(found, Ended) and not (found.failed and await self._is_reopened_later()):
                return found
            if not await self._read_on():
                return found

    async def read_all(self) -> None:
        while await self._read_on():
            pass

    async def _read_on(self) -> bool:
        """Read one more page; False at the journal's end."""
        read_to = self._read_to
        async with self._reading:
            if self.is_live:
                return False
            if self._read_to == read_to:  # else another branch has read on meanwhile
                for record in await self._page(self._read_to):
                    self.feed(record)
                    self._read_to = record["sequence_number"]
            return True

    async def _page(self, after: int) -> list[dict[str, Any]]:
        attempt = self._attempt
        attempt.verify_going()
        page = await attempt.ask("GET", f"/v1/runs/{attempt.run_id}/checkpoints?after_seq={after}&limit=1000")
        items: list[dict[str, Any]] = page["items"]
        if not items:
            raise attempt.give_up(Over("FAILED", failure("RUN_JOURNAL_SHORT", f"the journal ends after entry {after}")))
        return items

    async def _is_reopened_later(self) -> bool:
        """Whether an entry that is not read yet reopens what failed. Looked for once; nothing is kept of the look."""
        if self.is_live:
            return False
        if self._resumed_at is None:
            self._resumed_at = []
            after = self._read_to
            while after < self._leased_to:
                for record in await self._page(after):
                    after = record["sequence_number"]
                    if record["artifact_type"] == "run_resumption":
                        self._resumed_at.append(after)
        return any(number > self._read_to for number in self._resumed_at)

    def feed(self, record: dict[str, Any]) -> None:
        """Add a record of the gateway's to the journal, with the value that the gateway has joined to it."""
        joined, value = record.get("joined"), record.get("value") or {}
        if value.get("tier") == "effect" and (joined is not None or record.get("outcome") == "OK"):
            record = {**record, "value": {"tier": "inline", "value": tool_output(joined)}}
        elif joined is not None:
            if value.get("tier") == "secret":
                record = {**record, "value": {"tier": "secret", "value": joined}}
            elif isinstance(joined, dict) and "tier" in joined:
                record = {**record, "value": joined}
        if record["artifact_type"] == "run_start" and record.get("forked_from"):
            self.fork_changes = list(record["forked_from"].get("state_change") or ())
        self.journal.add(record)

    def draws(self, scope: str) -> Draws:
        if self._drawers is not None:
            return ForkDraws(fork_salt(self._draw_salt, self._attempt.run_id), scope, self._drawers)
        return Draws(self._draw_salt, scope)

    async def read_drawers(self) -> None:
        """Of a fork: which runs were at which addresses before. Read ahead, because a draw cannot wait; of the records
        nothing is kept."""
        after = self._first_seq
        if after >= 0:
            return
        drawers = Drawers(self._draw_salt)
        while after < 0:
            for record in await self._page(after):
                after = record["sequence_number"]
                if after > 0:
                    break
                drawers.add_run(record["run_id"])
                if "path" in record:
                    has_ended = record["artifact_type"] == "run_checkpoint" and record["outcome"] != "RETRY"
                    drawers.add(record["run_id"], record["path"], has_ended=has_ended)
        self._drawers = drawers
