"""What must be true after the load, whatever was killed: in the store, in the bank's book and in what clients saw."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tests.load.asking import Seen
from tests.load.world import Life, World

# A request that was on its way when the gateway went, or came before it was back.
_AROUND_KILLS_S: Final = 0.25
WARM_UP_S: Final = 6.0
LONG_LIFE_S: Final = 14.0
GROWTH_MB_MAX: Final = 12.0
FINDINGS_SHOWN: Final = 40
FINDING_CHARS_SHOWN: Final = 2_000


@dataclass
class Verdict:
    """`findings` is empty when every promise was kept; `summary` counts what was tried."""

    findings: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def find(self, what: str, found: Iterable[Any]) -> None:
        self.findings += [f"{what}: {one}" for one in found]

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.summary.items()]
        lines += [f"WRONG  {finding[:FINDING_CHARS_SHOWN]}" for finding in self.findings[:FINDINGS_SHOWN]]
        return "\n".join([*lines, f"{len(self.findings)} findings"])


def observations(notebooks: Iterable[Path]) -> Iterator[Seen]:
    for notebook in notebooks:
        with notebook.open() as file:
            for line in file:
                yield Seen(**json.loads(line))


def judge(
    world: World, notebooks: list[Path], feeds: dict[str, dict[str, int]], *, with_memory: bool = True
) -> Verdict:
    """After the last gateway has ended in order."""
    verdict = Verdict()
    told = _judge_answers(verdict, world.lives, observations(notebooks))
    _judge_store(verdict, world, told, feeds)
    _judge_book(verdict, world, told)
    if with_memory:
        _judge_memory(verdict, world.lives)
    verdict.find("a gateway's own words", world.incidents())
    verdict.find("tga verify", filter(None, [world.verify()]))
    ends = Counter(life.end for life in world.lives)
    verdict.summary["gateways"] = f"{len(world.lives)}, ended by {dict(ends)}"
    starts = [life.ready_s - life.started_s for life in world.lives]
    verdict.summary["seconds to start"] = f"{statistics.median(starts):.1f} (median), {max(starts):.1f} (most)"
    stops = [life.gone_s - life.killed_s for life in world.lives if life.end == "SIGTERM"]
    verdict.summary["seconds to stop in order"] = f"{max(stops):.1f} (most)"
    verdict.find("not stopped in order", (life for life in world.lives if life.end == "SIGTERM" and life.returncode))
    return verdict


@dataclass
class Told:
    """What clients were told, by trace: effects that they received, traces that they were promised."""

    effects: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    states: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    promised: set[str] = field(default_factory=set)
    completed_keys: dict[tuple[str, str], str] = field(default_factory=dict)


def _judge_answers(verdict: Verdict, lives: list[Life], answers: Iterable[Seen]) -> Told:
    told = Told()
    actions, codes, lost = Counter[str](), Counter[str](), Counter[str]()
    waits: list[float] = []
    for seen in answers:
        actions[seen.what] += 1
        if seen.bad is not None:
            verdict.findings.append(f"{seen.client} {seen.what} {seen.status} {seen.trace_id or ''}: {seen.bad}")
        if seen.lost is not None:
            lost[seen.lost] += 1
            if not _is_around_a_kill(seen, lives):
                verdict.findings.append(f"{seen.client} {seen.what}: {seen.lost} while the gateway was up")
        if seen.code is not None:
            codes[f"{seen.status} {seen.code}"] += 1
        if seen.status is not None and seen.what != "follow":
            waits.append(seen.ended_s - seen.began_s)
        if seen.trace_id is not None:
            _remember(told, seen)
    span_s = lives[-1].killed_s - lives[0].ready_s
    verdict.summary["requests"] = f"{sum(actions.values())}, {sum(actions.values()) / span_s:.0f} a second"
    verdict.summary["by action"] = dict(actions.most_common())
    verdict.summary["by code"] = dict(codes.most_common())
    verdict.summary["connections lost, all around kills"] = dict(lost)
    ordered = sorted(waits)
    if ordered:
        p50, p99 = (ordered[len(ordered) * percent // 100] * 1e3 for percent in (50, 99))
        verdict.summary["answered within"] = f"{p50:.0f} ms (p50), {p99:.0f} ms (p99)"
    return told


def _remember(told: Told, seen: Seen) -> None:
    trace_id = str(seen.trace_id)
    if seen.effect_sha256 is not None:
        told.effects[trace_id].add(seen.effect_sha256)
    if seen.state in ("COMPLETED", "FAILED", "DENIED"):
        told.states[trace_id].add(str(seen.state))
    if seen.code == "CALL_DENIED":
        told.states[trace_id].add("DENIED")
    if seen.status in (200, 202) and seen.what != "follow":
        told.promised.add(trace_id)
    if seen.status == 200 and seen.key is not None and seen.tool is not None and seen.state == "COMPLETED":
        told.completed_keys[seen.tool, seen.key] = trace_id


def _is_around_a_kill(seen: Seen, lives: list[Life]) -> bool:
    for life, following in zip(lives, [*lives[1:], None], strict=True):
        back_s = following.ready_s if following is not None else float("inf")
        if seen.ended_s >= life.killed_s - _AROUND_KILLS_S and seen.began_s <= back_s + _AROUND_KILLS_S:
            return True
    return False


def _judge_store(verdict: Verdict, world: World, told: Told, feeds: dict[str, dict[str, int]]) -> None:
    database = world.database
    heads = {
        row["stream"].removeprefix("trace:"): row
        for row in database.fetch(
            "SELECT stream, state, waiting, sequence_number FROM tga.heads WHERE stream LIKE 'trace:%'"
        )
    }
    effects = {trace_id: sha256(raw).hexdigest() for trace_id, raw in database.effects().items()}
    verdict.summary["traces"] = dict(Counter(row["state"] for row in heads.values()))
    verdict.summary["sent again after an unknown outcome"] = database.fetch(
        "SELECT count(*) FROM tga.dispatch_attempts WHERE attempt > 1"
    )[0][0]
    verdict.find("stranded", database.unrested())
    verdict.find("still recoverable", database.fetch("SELECT tga.recoverable('trace', NULL, NULL, 100)"))
    verdict.find("still waiting", (dict(row) for row in heads.values() if row["waiting"] is not None))
    verdict.find("promised and gone", (trace_id for trace_id in told.promised if trace_id not in heads))
    for trace_id, answered in told.effects.items():
        if answered != {effects.get(trace_id)}:
            verdict.findings.append(f"{trace_id}: answered {answered}, recorded {effects.get(trace_id)}")
    for trace_id, states in told.states.items():
        if trace_id not in heads or states != {heads[trace_id]["state"]}:
            verdict.findings.append(f"{trace_id}: told {states}, recorded {heads.get(trace_id)}")
    verdict.summary["answers with an effect, all as recorded"] = len(told.effects)
    expected = {f"trace:{trace_id}": row["sequence_number"] for trace_id, row in heads.items()}
    for auditor, last_of in feeds.items():
        seen = {stream: number for stream, number in last_of.items() if stream.startswith("trace:")}
        missed = {stream for stream, number in expected.items() if seen.get(stream) != number}
        verdict.find(f"the feed of {auditor} lacks", sorted(missed)[:3])
        verdict.summary[f"entries in the feed of {auditor}"] = sum(seen.values())


def _judge_book(verdict: Verdict, world: World, told: Told) -> None:
    """The bank's own book is the judge of what was executed."""
    executions: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    ids: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for raw in world.bank.book.read_bytes().splitlines():
        line = json.loads(raw)
        if line["idempotency_key"] is not None:
            at = (line["tool"], line["idempotency_key"])
            ids[at].add(line["tool_call_id"])
            if line["event"] == "execution":
                executions[at].append(line)
    effects = world.database.effects()
    claims = {
        (row["tool_name"], row["idempotency_key"]): row["stream"].removeprefix("trace:")
        for row in world.database.fetch("SELECT tool_name, idempotency_key, stream FROM tga.claims")
    }
    verdict.find("a key was executed more than once", (at for at, lines in executions.items() if len(lines) > 1))
    by_id = Counter(line["tool_call_id"] for lines in executions.values() for line in lines)
    verdict.find("a call was executed more than once", (one for one, count in by_id.items() if count > 1))
    verdict.find("sent under two ids", (at for at, found in ids.items() if len(found) > 1))
    verdict.find("executed without a claim", executions.keys() - claims.keys())
    verdict.find(
        "told that it is completed, and never executed", (at for at in told.completed_keys if at not in executions)
    )
    for at, trace_id in claims.items():
        effect = json.loads(effects[trace_id]) if trace_id in effects else None
        is_success = effect is not None and effect["outcome"] == "SUCCESS"
        if is_success != (at in executions):
            verdict.findings.append(f"{at} {trace_id}: executed {len(executions[at])} times, recorded {effect}")
        elif effect is not None and is_success:
            line = executions[at][0]
            if (line["tool_call_id"], json.loads(line["answer"])) != (
                effect["tool_call_id"],
                effect["output"]["value"],
            ):
                verdict.findings.append(f"{at} {trace_id}: the book says {line}, the record {effect}")
    verdict.summary["executions in the bank's book, each key once"] = sum(map(len, executions.values()))


def _judge_memory(verdict: Verdict, lives: list[Life]) -> None:
    """Of lives that were long enough to have an opinion on: what they had at the end, against after warming up."""
    grown = []
    for number, life in enumerate(lives, 1):
        samples = [mb for at_s, mb in life.rss if at_s >= WARM_UP_S]
        if life.rss and life.rss[-1][0] >= LONG_LIFE_S:
            quarter = max(1, len(samples) // 4)
            growth = statistics.median(samples[-quarter:]) - statistics.median(samples[:quarter])
            grown.append(f"{samples[0]:.0f} to {samples[-1]:.0f} MB in {life.rss[-1][0]:.0f} s")
            if growth > GROWTH_MB_MAX:
                verdict.findings.append(f"the memory of gateway {number} grew by {growth:.1f} MB: {life.rss[::8]}")
    if not grown:
        verdict.findings.append("no gateway lived long enough to say something about its memory")
    verdict.summary["memory of long lives, after warming up"] = grown
    peaks = [max(mb for _, mb in life.rss) for life in lives if life.rss]
    verdict.summary["memory at most"] = f"{max(peaks):.0f} MB"
