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
CREATE TABLE baseline.links (LIKE tga.links INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.payloads (LIKE tga.payloads INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.heads (LIKE tga.heads INCLUDING DEFAULTS INCLUDING INDEXES) WITH (fillfactor = 80);
CREATE TABLE baseline.in_work (LIKE tga.in_work INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE FUNCTION baseline.begin_call(s text, d bytea, o uuid, a1 bytea, a2 bytea, a3 bytea) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
BEGIN
    INSERT INTO baseline.heads (stream, tenant, principal_id, subject, name, idempotency_key, payload_digest,
                                sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open)
    VALUES (s, 'default', 'agent-1', 'crm', 'create_ticket', s, d, 3, d, 'EXECUTING', d, o, NULL, true)
    RETURNING stream_no INTO number;
    INSERT INTO baseline.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                                artifact_digest, recorded_at, artifact_type, from_state, to_state)
    SELECT number, n, n, 3, o, d, d, d, '2026-01-01T00:00:00.000Z', 'supervisor_decision', 'PENDING', 'AUTHORIZED'
      FROM generate_series(1, 3) AS n;
    INSERT INTO baseline.payloads (stream_no, sequence_number, artifacts) VALUES (number, 1, ARRAY[a1, a2, a3]);
    INSERT INTO baseline.in_work VALUES ('trace', number);
END
$$;
CREATE FUNCTION baseline.end_call(s text, d bytea, o uuid, a4 bytea) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
BEGIN
    UPDATE baseline.heads
       SET sequence_number = 4, entry_digest = d, state = 'COMPLETED', artifact_digest = d, owner = NULL,
           effect_digest = d, is_open = false, updated_at = clock_timestamp()
     WHERE stream = s RETURNING stream_no INTO number;
    INSERT INTO baseline.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                                artifact_digest, recorded_at, artifact_type, from_state, to_state)
    VALUES (number, 4, 1, 1, o, d, d, d, '2026-01-01T00:00:00.000Z', 'tool_effect', 'EXECUTING', 'COMPLETED');
    INSERT INTO baseline.payloads (stream_no, sequence_number, artifacts) VALUES (number, 4, ARRAY[a4]);
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
        return cls(rounds=1, seconds=0.1, prepared_calls=2_000)


async def step_of_real_call(server: Server) -> Step:
    """Make one call, and ask for rows of just its sizes."""
    async with open_gateway(server.gateway_url, Answering()) as gateway:
        answer = await completed(gateway.runtime, next(fresh_calls("size")))
    async with measuring_session(server.admin_url) as session:
        rows = await session.fetch(
            "SELECT sequence_number, octet_length(entry) AS entry, octet_length(artifact) AS artifact"
            " FROM tga.records WHERE stream = $1 ORDER BY sequence_number",
            f"trace:{answer.trace_id}",
        )
    assert [row["sequence_number"] for row in rows] == [1, 2, 3, 4]
    values: dict[str, bytes | str] = {"digest": bytes(32), "owner": EXECUTOR}
    for row in rows:
        values[f"a{row['sequence_number']}"] = bytes(row["artifact"])
    return Step(
        schema=BASELINE,
        statements=(
            "SELECT baseline.begin_call(:stream, :digest, :owner, :a1, :a2, :a3)",
            "SELECT baseline.end_call(:stream, :digest, :owner, :a4)",
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
            "links": 4 * steps,
            "payloads": 2 * steps,
            "heads": steps,
            "in_work": steps,
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
        f"{machine}; artifacts of {[sizes[f'a{n}'] for n in range(1, 5)]} bytes; "
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
