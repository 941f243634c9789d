"""What a tool call costs, against its two transactions without any check: `python -m bench.tool_call [--quick]`.

In process: from the parsed call to its answer, all of the gateway but the wire. The connector answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console

from bench.baseline import Baseline, Step
from bench.cost import measuring_session
from bench.gateway import Answering, completed, cost_of_calls, fresh_calls, open_gateway
from bench.measure import (
    AT_ONCE,
    BASELINE_CLIENTS,
    Cell,
    Rounds,
    Server,
    Timing,
    arguments_of,
    closed_loop,
    measure_sync,
    run_bench,
    throughput_table,
)
from bench.prepared import prepared_baseline
from tests.traces import EXECUTOR

COUNTED_CALLS: Final = 50
# How many times pgbench at as many clients (at 32 for more) the gateway should make.
AIMS: Final = {32: 1.0, 128: 1.5}
PREPARED_CLIENTS: Final = 32

# The same columns and indexes as the ledger's tables, without checks, triggers, locks or hashing.
BASELINE: Final = """
CREATE SCHEMA baseline;
CREATE TABLE baseline.entries (LIKE tga.entries INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.artifacts (LIKE tga.artifacts INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.claims (LIKE tga.claims INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.claim_effects (LIKE tga.claim_effects INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.execution_checkpoints (LIKE tga.execution_checkpoints INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.heads (LIKE tga.heads INCLUDING DEFAULTS INCLUDING INDEXES) WITH (fillfactor = 70);
CREATE FUNCTION baseline.begin_call(
    s text, d bytea, o uuid, e1 bytea, e2 bytea, e3 bytea, a1 bytea, a2 bytea, a3 bytea, checkpoint bytea, at text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO baseline.claims (server_id, tool_name, idempotency_key, stream, payload_digest)
    VALUES ('crm', 'create_ticket', s, s, d);
    INSERT INTO baseline.entries (stream, sequence_number, entry, entry_digest)
    VALUES (s, 1, e1, d), (s, 2, e2, d), (s, 3, e3, d);
    INSERT INTO baseline.artifacts (stream, sequence_number, artifact) VALUES (s, 1, a1), (s, 2, a2), (s, 3, a3);
    INSERT INTO baseline.heads (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open)
    VALUES (s, 3, d, 'EXECUTING', d, o, NULL, true);
    INSERT INTO baseline.execution_checkpoints
           (stream, sequence_number, checkpoint_state, checkpoint_digest, created_at)
    VALUES (s, 3, checkpoint, d, at);
END
$$;
CREATE FUNCTION baseline.end_call(s text, d bytea, e4 bytea, a4 bytea) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO baseline.entries (stream, sequence_number, entry, entry_digest) VALUES (s, 4, e4, d);
    INSERT INTO baseline.artifacts (stream, sequence_number, artifact) VALUES (s, 4, a4);
    UPDATE baseline.heads
       SET sequence_number = 4, entry_digest = d, state = 'COMPLETED', artifact_digest = d, owner = NULL,
           is_open = false, updated_at = clock_timestamp()
     WHERE stream = s;
    INSERT INTO baseline.claim_effects (stream, artifact_digest) VALUES (s, d);
END
$$;
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    rounds: int
    seconds: float
    prepared_calls: int  # more than the database can make in that time

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=5, seconds=2.0, prepared_calls=40_000)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.5, prepared_calls=5_000)


async def step_of_real_call(server: Server) -> Step:
    """Make one call, and ask for rows of just its sizes."""
    async with open_gateway(server.gateway_url, Answering()) as gateway:
        answer = await completed(gateway.runtime, next(fresh_calls("size")))
    async with measuring_session(server.admin_url) as session:
        rows = await session.fetch(
            "SELECT sequence_number, octet_length(entry) AS entry, octet_length(artifact) AS artifact"
            " FROM tga.entries JOIN tga.artifacts USING (stream, sequence_number) WHERE stream = $1",
            f"trace:{answer.trace_id}",
        )
        (checkpoint,) = await session.fetch(
            "SELECT octet_length(checkpoint_state) AS size, created_at FROM tga.execution_checkpoints"
        )
    assert [row["sequence_number"] for row in rows] == [1, 2, 3, 4]
    values: dict[str, bytes | str] = {"digest": bytes(32), "owner": EXECUTOR, "at": checkpoint["created_at"]}
    values["checkpoint"] = bytes(checkpoint["size"])
    for row in rows:
        values[f"e{row['sequence_number']}"] = bytes(row["entry"])
        values[f"a{row['sequence_number']}"] = bytes(row["artifact"])
    return Step(
        schema=BASELINE,
        statements=(
            "SELECT baseline.begin_call(:stream, :digest, :owner, :e1, :e2, :e3, :a1, :a2, :a3, :checkpoint, :at)",
            "SELECT baseline.end_call(:stream, :digest, :e4, :a4)",
        ),
        values=values,
    )


async def run_calls(server: Server, name: str, at_once: int, seconds: float) -> tuple[Timing, float]:
    """The timing, and how many plans stood in a batch."""
    queues = [fresh_calls(f"{name}-{at_once}-{worker}") for worker in range(at_once)]
    async with open_gateway(server.gateway_url, Answering()) as gateway:
        timing = await closed_loop(server, lambda call: completed(gateway.runtime, call), queues, seconds)
        return timing, gateway.ledger.plans / gateway.ledger.batches


async def checkpoint(server: Server) -> None:
    async with measuring_session(server.admin_url) as session:
        await session.execute("CHECKPOINT")


async def measure_throughput(
    server: Server, baseline: Baseline, checked: Baseline | None, scale: Scale
) -> tuple[Rounds, list[float]]:
    """The lines of the table, and how long the disk took in each round, in ms.

    Each stretch begins with a checkpoint: what those before it left to be written is not charged to it.
    """
    rounds = Rounds()
    sync_ms = []
    for number in range(scale.rounds):
        sync_ms.append(measure_sync(server.embedded.data_dir))
        for at_once in AT_ONCE:
            if at_once in BASELINE_CLIENTS:
                await checkpoint(server)
                rounds.add("baseline", at_once, await baseline.run(at_once, scale.seconds))
            if at_once == PREPARED_CLIENTS and checked is not None:
                await checkpoint(server)
                rounds.add("checked", at_once, await checked.run(at_once, scale.seconds))
            await checkpoint(server)
            timing, batch_size = await run_calls(server, f"round-{number}", at_once, scale.seconds)
            rounds.add("call", at_once, timing, batch_size=batch_size)
    steps = baseline.steps
    await baseline.verify_stored(
        {
            "entries": 4 * steps,
            "artifacts": 4 * steps,
            "claims": steps,
            "claim_effects": steps,
            "execution_checkpoints": steps,
            "heads": steps,
        }
    )
    return rounds, sync_ms


def verdict_on_aims(cells: list[Cell]) -> list[str]:
    """By either reading of "pgbench doing the two transactions": bare inserts of the rows, or the gateway's own."""
    lines = []
    checked = [cell for cell in cells if cell.name == "checked"]
    for cell in cells:
        aim = AIMS.get(cell.at_once)
        if cell.name == "call" and aim is not None:
            lines.append(f"Aim at {cell.at_once}: {_verdict(cell, aim, 'bare inserts')}")
            for other in checked:
                beside = Cell(cell.name, cell.at_once, cell.rounds, other.rounds)
                lines.append(f"          {_verdict(beside, aim, 'the same transactions, unbatched')}")
    return lines


def _verdict(cell: Cell, aim: float, baseline: str) -> str:
    said = "met" if cell.ratio >= aim else f"NOT met, {aim / cell.ratio:.1f} times too slow"
    return f"at least {aim:.1f} of {baseline}; found {cell.ratio:.2f}: {said}"


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    step = await step_of_real_call(server)
    baseline = Baseline(server, step)
    await baseline.prepare()
    sizes = {name: len(value) for name, value in step.values.items() if isinstance(value, bytes)}
    console.print(
        f"{machine}; entries of {[sizes[f'e{n}'] for n in range(1, 5)]} bytes, artifacts of "
        f"{[sizes[f'a{n}'] for n in range(1, 5)]}, a checkpoint of {sizes['checkpoint']}; "
        f"{scale.rounds} rounds of {scale.seconds:g} s, medians"
    )
    async with measuring_session(server.observer_url) as observer:
        commits, trips = await cost_of_calls(server.gateway_url, observer, "counted", COUNTED_CALLS)
    console.print(
        f"An allowed call with a fresh key, alone: {commits / COUNTED_CALLS:.2f} commits, "
        f"{trips / COUNTED_CALLS:.2f} statements (round trips)"
    )
    async with prepared_baseline(server, scale.prepared_calls) as checked:
        rounds, sync_ms = await measure_throughput(server, baseline, checked, scale)
    cells = rounds.cells()
    title = (
        f"Calls: four entries, two transactions. Baseline: {baseline.name}, bare inserts, unbatched; "
        "checked: the gateway's own transactions, likewise"
    )
    console.print(throughput_table(title, cells))
    console.print(f"The disk alone, a write and fdatasync in each round: {', '.join(f'{ms:.2f}' for ms in sync_ms)} ms")
    for line in verdict_on_aims(cells):
        console.print(line)


def main() -> None:
    scale = Scale.quick() if arguments_of("tool_call", __doc__).parse_args().quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
