"""A demonstration for auditors: append a tool call, tamper with it as a superuser, verify.

It stands alone: an embedded PostgreSQL of its own, in a folder that is removed in the end. Nothing of TGA_HOME is used:
what the signer of a gateway there remembers is of another log, and comparing with it would be a false alarm.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg
from rich.console import Console

from app.clock import SystemClock
from app.core.errors import TgaError
from app.domain.identity import Principal
from app.domain.tga.documents import (
    ActionRequest,
    ArtifactDocument,
    DecidedBy,
    JsonOutput,
    SupervisorDecision,
    ToolCall,
    ToolEffect,
    TraceId,
)
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import advance
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.ownership import Executor
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from app.postgres.state_store import PostgresStateStore

DATABASE = "tga"
console = Console(highlight=False, soft_wrap=True)


class Story:
    """One charge of a card, from request to effect, each step appended as it happens."""

    def __init__(self, store: PostgresStateStore, executor_id: str) -> None:
        self._clock = SystemClock()
        self.trace_id = TraceId(self._clock.new_id())
        self._store = store
        self._executor_id = executor_id
        self._state: ExecutionState | None = None

    async def append(self, artifact: ArtifactDocument) -> str:
        record, state = advance(self._state, artifact, executor_id=self._executor_id, recorded_at=self._clock.now())
        await self._store.append_log_entry(record)
        self._state = state
        entry = record.entry
        console.print(
            f"  entry {entry.sequence_number}  {entry.from_state:>10} → {entry.to_state:<10} "
            f"{entry.artifact_type:<20} {entry.entry_digest[:16]}…"
        )
        return entry.artifact_digest

    async def tell(self) -> None:
        call = {
            "server_id": "pay",
            "tool_name": "charge",
            "tool_class": "write",
            "tool_definition_digest": None,
            "arguments": {"amount": 4200, "currency": "EUR"},
            "idempotency_key": f"order-{self.trace_id[:8]}",
        }
        request = await self.append(
            ActionRequest.model_validate(
                {
                    **call,
                    "trace_id": self.trace_id,
                    "requested_at": self._clock.now(),
                    "expires_at": None,
                    "principal": Principal(principal_id="agent-7", tenant="default"),
                    "intent": "charge the customer for order 7",
                }
            )
        )
        decision = await self.append(
            SupervisorDecision(
                trace_id=self.trace_id,
                action_request_digest=request,
                decision="APPROVE",
                decided_by=DecidedBy(type="policy", id="default"),
                decided_at=self._clock.now(),
                policy_digest=None,
                policy_ids=["charges-below-100"],
                rationale=None,
                signature=None,
            )
        )
        tool_call_id = self._clock.new_id()
        sent = await self.append(
            ToolCall.model_validate(
                {
                    **call,
                    "trace_id": self.trace_id,
                    "tool_call_id": tool_call_id,
                    "supervisor_decision_digest": decision,
                    "on_unknown_outcome": "redispatch",
                    "reconcile_tool": None,
                    "prepared_at": self._clock.now(),
                }
            )
        )
        await self.append(
            ToolEffect(
                trace_id=self.trace_id,
                tool_call_id=tool_call_id,
                tool_call_digest=sent,
                outcome="SUCCESS",
                basis="answer",
                output=JsonOutput(encoding="json", value={"charge": "ch_1", "amount": 4200}),
                error=None,
                attempts=[],
                resolution=None,
                recorded_at=self._clock.now(),
            )
        )


async def tamper(admin_url: str, trace_id: TraceId) -> None:
    session = await asyncpg.connect(admin_url)
    try:
        change = (
            "UPDATE tga.payloads p"
            " SET artifacts[1] = convert_to(replace(convert_from(p.artifacts[1], 'UTF8'), '4200', '9900'), 'UTF8')"
            " FROM tga.heads h WHERE h.stream_no = p.stream_no AND h.stream = $1 AND p.sequence_number = 4"
        )
        try:
            await session.execute(change, f"trace:{trace_id}")
        except asyncpg.PostgresError as error:
            console.print(f"  as a superuser:           [green]refused[/] ({error})")
        await session.execute("ALTER TABLE tga.payloads DISABLE TRIGGER append_only")
        await session.execute(change, f"trace:{trace_id}")
        await session.execute("ALTER TABLE tga.payloads ENABLE ALWAYS TRIGGER append_only")
        console.print("  with the trigger off:     [red]done[/], 42.00 became 99.00 in the recorded effect")
    finally:
        await session.close()


def run_tga(home: Path, *arguments: str) -> int:
    shown = " ".join(arguments)
    console.print(f"  $ tga {shown}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    return subprocess.run(
        [sys.executable, "-m", "app.main", *arguments], env={**clean, "TGA_HOME": str(home)}, check=False
    ).returncode


async def demonstrate(server: EmbeddedPostgres, home: Path) -> int:
    session = await asyncpg.connect(server.url())
    await session.execute(f"CREATE DATABASE {DATABASE}")
    await session.close()
    admin_url, gateway_url = server.url("postgres", DATABASE), server.url(GATEWAY_ROLE, DATABASE)

    console.print("\n[bold]1. Migrate[/]: tables that only grow, functions that judge every append")
    for migration in await migrate(admin_url):
        console.print(f"  applied {migration.version:04}_{migration.name}")

    console.print("\n[bold]2. Append[/]: one tool call, from request to effect, one transaction for each entry here")
    async with await Sessions.open(gateway_url) as sessions, await Executor.open(gateway_url) as executor:
        store = PostgresStateStore(sessions, PostgresLedger(sessions), executor)
        story = Story(store, executor.executor_id)
        await story.tell()
        console.print("\n[bold]3. Verify[/]: recompute everything")
        sound = run_tga(home, "verify", "--all")
        console.print("\n[bold]4. Tamper[/]: change the amount that was charged, behind the gateway's back")
        await tamper(admin_url, story.trace_id)
        console.print("\n[bold]5. Verify again[/]: it is found, at its entry, and nothing more is done on that trace")
        broken = run_tga(home, "verify", story.trace_id)
        try:
            await store.load_state(story.trace_id)
        except TgaError as error:
            console.print(f"  the runtime refuses to go on: [red]{error.code}[/]")
    return 0 if (sound, broken) == (0, 1) else 1


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="tga-tamper-"))
    home.chmod(0o711)
    console.print("Starting a PostgreSQL of its own …")
    try:
        with EmbeddedPostgres(home) as server:
            return asyncio.run(demonstrate(server, home))
    except TgaError as error:
        console.print(f"[bold red]error[/] {error}")
        return 3
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
