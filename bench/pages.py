"""What pages of the console, and the API behind them, cost beside few calls and beside many.

    python -m bench.pages [--quick] [--calls 1000000] [--runs 100000] [--checkpoints 20000]

CONSOLE.md, acceptance 13. One real gateway on a database of its own: real calls and runs, then copies of them until
there are 1,000, every page and list with its filters, then copies until there are as many as asked for, and every page
again: once with tables that were never analysed, once after VACUUM ANALYZE. Buffers come from auto_explain after plans
have become generic, processor time from the kernel, both of the last of several requests.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from app.postgres.sessions import GATEWAY_ROLE
from bench.cost import measuring_session
from bench.measure import arguments_of
from bench.page_addresses import addresses
from bench.page_stock import add_calls, add_runs, mark_seeds, take_up
from tests.cli.hand_worker import HandWorker, ask, complete, fail, may_start, step, suspend
from tests.cli.world import World, wait_for
from tests.conftest import make_home

FEW: Final = 1_000
WITHIN: Final = 2.0
SLACK_BUFFERS: Final = 24  # a level more of each index that a page reads
SLACK_MS: Final = 2.0
WARM: Final = 6  # PostgreSQL settles on a generic plan after five
ROUNDS: Final = 5
_EXPLAIN: Final = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_timing": "off",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_format": "json",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one request. `background`: statements that the gateway makes unasked are left out."""

    buffers: int
    gateway_ms: float
    database_ms: float
    body_bytes: int
    worst: str = ""


class Visitor:
    """One who asks for pages and lists, with a session and with a key."""

    def __init__(self, world: World, key: str) -> None:
        self.url, self.key = world.url, key
        form = urllib.parse.urlencode({"key": key}).encode()
        request = urllib.request.Request(f"{self.url}/console/sign-in", data=form)  # noqa: S310
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            answer = opener.open(request)
        except urllib.error.HTTPError as redirected:
            answer = redirected
        with answer:
            self.cookie = str(answer.headers["Set-Cookie"]).partition(";")[0]

    def ask(self, path: str) -> bytes:
        headers = {"Cookie": self.cookie} if path.startswith("/console") else {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
                body: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read()[:400]!r}") from None
        return body

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def cpu_ms(root: int) -> float:
    """What a process and its descendants have used, to the nanosecond as the kernel keeps it."""
    children: dict[int, list[int]] = {}
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            try:
                parent = int((one / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(one.name))
    spent, left = 0, [root]
    while left:
        process = left.pop()
        left += children.get(process, [])
        for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                spent += int(thread.read_text().split()[0])
            except OSError:
                continue
    return spent / 1e6


class Statements:
    """What auto_explain has written to the server's log since it was last asked."""

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, log.stat().st_size

    def new(self) -> list[tuple[str, int]]:
        """Statements and the buffers that each has touched."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read().decode("utf-8", "replace")
        self._read += len(text.encode())
        found = []
        for part in text.split("plan:\n")[1:]:
            lines = []
            for line in part.split("\n"):
                if not line.startswith("\t"):
                    break
                lines.append(line)
            try:
                told = json.loads("\n".join(lines))
            except ValueError:
                continue
            plan = told["Plan"]
            found.append((told["Query Text"], plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]))
        return found


class Bench:
    def __init__(self, world: World, console: Console, *, warm: int, rounds: int) -> None:
        self.world, self.console = world, console
        self._warm, self._rounds = warm, rounds
        self.ids: dict[str, str] = {}
        self.key = ""
        self.file = world.home / "pages.json"
        self._figures: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            self.ids, self.key, self._figures = json.loads(self.file.read_text())

    def keep(self, figures: dict[str, dict[str, Any]]) -> None:
        self._figures |= figures
        self.file.write_text(json.dumps([self.ids, self.key, self._figures]))

    def kept(self, calls: int) -> dict[str, Figures] | None:
        found = self._figures.get(str(calls))
        return None if found is None else {name: Figures(**one) for name, one in found.items()}

    # What is there.
    def play(self, lengths: tuple[int, int]) -> dict[str, str]:
        """Real calls and runs in every state; the streams of which others are copies."""
        world = self.world
        self.key = world.new_key("everyone", "agent", "supervisor", "operator", "auditor", "worker", "admin")
        seeds = {"held": self._call("slow_charge", {"amount": 7, "ms": 60_000}, "held-1", wait_ms=0)}
        completed: list[tuple[str, dict[str, Any]]] = [
            *(("slow_charge", {"amount": 5, "ms": ms}) for ms in (1, 30, 120, 400)),
            ("charge", {"amount": 42}),
            ("pay_card", {"amount": 9, "card": "4242"}),
            ("balance", {}),
        ]
        for place, (tool, given) in enumerate(completed):
            seeds[f"completed-{place}"] = self._call(tool, given, f"done-{place}")
        seeds["failed"] = self._call("fail", {}, "failed-1")
        seeds["denied"] = self._call("charge", {"amount": 13}, "denied-1")
        seeds["pending"] = self._call("refund", {"amount": 18_900}, "pending-1", intent="The parcel arrived broken.")
        self.ids |= {"done": seeds["completed-4"], "waits": seeds["pending"], "held": seeds["held"]}
        wait_for(lambda: self._get(f"/v1/traces/{seeds['held']}")["waiting"] == "operator")
        streams = {kind: f"trace:{trace_id}" for kind, trace_id in seeds.items()}
        worker = HandWorker(world, self.key)
        worker.register()
        for kind, put, then in (
            ("asking", [ask("1", "Pay?", {"type": "boolean"})], suspend("1")),
            ("failed", [step("1", 1)], fail("The books do not fit.")),
            ("completed", [step("1", 1)], complete(1, 1)),
        ):
            self._start(f"seed-{kind}")
            worker.lease()
            worker.put(*put, then=then)
            streams[f"run-{kind}"] = f"run:seed-{kind}"
        for length in lengths:
            self._start(f"long-{length}")
            worker.lease()
            for first in range(1, length, 50):
                worker.put(*(step(str(n), n, name=f"step_{n % 7}") for n in range(first, min(first + 50, length))))
            worker.put(then=fail("The books do not fit."))
        return streams

    def _start(self, run_id: str) -> None:
        self._post("/v1/runs", {"procedure": "onboard", "input": {}, "run_id": run_id})

    def _call(self, tool: str, arguments: dict[str, Any], key: str, **more: Any) -> str:
        body = {"server_id": "bank", "tool_name": tool, "arguments": arguments, "idempotency_key": key, **more}
        return str(self._post("/v1/tool-calls", body)["trace_id"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.world.url + path, json.dumps(body).encode(), headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                told = json.load(error)
        if "trace_id" not in told:
            raise RuntimeError(f"{path}: {told}")
        return told

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(  # noqa: S310
            self.world.url + path, headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            return json.load(answer)

    async def copy(self, seeds: dict[str, str] | None, calls: tuple[int, int], runs: tuple[int, int]) -> None:
        async with measuring_session(self.world.admin_url) as session:
            if seeds is not None:
                await mark_seeds(session, seeds)
            await add_calls(session, *calls, self.console.print)
            await add_runs(session, *runs, self.console.print)
            await take_up(session, self.console.print)

    async def analyse(self) -> None:
        async with measuring_session(self.world.admin_url) as session:
            await session.execute("VACUUM (ANALYZE)", timeout=7200)

    async def _set(self, settings: dict[str, str], *, is_reset: bool = False) -> None:
        async with measuring_session(self.world.admin_url) as session:
            for name, value in settings.items():
                to = "RESET " + name if is_reset else f"SET {name} = '{value}'"
                if name.startswith("auto_explain"):
                    await session.execute("LOAD 'auto_explain'")
                await session.execute(f"ALTER ROLE {GATEWAY_ROLE} {to}")

    # What it costs.
    def measure(self, calls: int, long: int) -> dict[str, Figures]:
        """Each address by name."""
        asyncio.run(self._set(_EXPLAIN))
        visitor = self._open()
        try:
            paths = addresses(visitor.json, {**self.ids, "long": f"long-{long}"}, long)
            statements = Statements(self.world._postgres.log_file)
            time.sleep(3)
            unasked = {text for text, _ in statements.new()}
            touched = {name: self._touched(visitor, path, statements, unasked) for name, path in paths.items()}
        finally:
            self.world.stop()
            asyncio.run(self._set(_EXPLAIN, is_reset=True))
        visitor = self._open()
        try:
            found = {name: self._timed(visitor, path, *touched[name]) for name, path in paths.items()}
            self.keep({str(calls): {name: asdict(one) for name, one in found.items()}})
            return found
        finally:
            self.world.stop()

    def _open(self) -> Visitor:
        self.world.start()
        visitor = Visitor(self.world, self.key)
        until = time.monotonic() + 3600
        while time.monotonic() < until:  # the sequencer signs what was added
            stats = visitor.json("/v1/stats")
            signed = int(visitor.ask("/v1/log/checkpoint").split(b"\n")[1])
            if signed >= stats["tree_size"] <= stats["folded_leaves"]:
                return visitor
            time.sleep(0.5)
        raise RuntimeError("the sequencer and the fold did not come to rest within an hour")

    def _touched(self, visitor: Visitor, path: str, statements: Statements, unasked: set[str]) -> tuple[int, str]:
        for _ in range(self._warm):
            visitor.ask(path)
        statements.new()
        visitor.ask(path)
        asked = [(text, buffers) for text, buffers in statements.new() if text not in unasked]
        worst = max(asked, key=lambda one: one[1], default=("", 0))
        return sum(buffers for _, buffers in asked), f"{worst[1]} of {' '.join(worst[0].split())[:400]}"

    def _timed(self, visitor: Visitor, path: str, buffers: int, worst: str) -> Figures:
        database = self.world._postgres.postmaster_pid()
        if self.world.gateway is None or database is None:
            raise RuntimeError("the gateway or its database is gone")
        gateway = self.world.gateway.pid
        spent: list[tuple[float, float]] = []
        body = b""
        for _ in range(self._warm):
            visitor.ask(path)
        for _ in range(self._rounds):
            before = cpu_ms(gateway), cpu_ms(database)
            body = visitor.ask(path)
            spent.append((cpu_ms(gateway) - before[0], cpu_ms(database) - before[1]))
        own, store = (statistics.median(one[place] for one in spent) for place in (0, 1))
        return Figures(buffers, own, store, len(body), worst)


def _table(title: str, few: dict[str, Figures], many: dict[str, Figures]) -> tuple[Table, list[str]]:
    table, exceeding = Table(title=title), []
    for heading in ("", "buffers", "beside many", "gateway ms", "beside many", "database ms", "beside many", "kB", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for name, small in few.items():
        if (large := many.get(name)) is None:  # of an older run
            continue
        is_met = large.buffers <= WITHIN * small.buffers + SLACK_BUFFERS and (
            large.gateway_ms + large.database_ms <= WITHIN * (small.gateway_ms + small.database_ms) + SLACK_MS
        )
        table.add_row(
            name,
            *(f"{small.buffers:,}", f"{large.buffers:,}", f"{small.gateway_ms:.1f}", f"{large.gateway_ms:.1f}"),
            *(f"{small.database_ms:.1f}", f"{large.database_ms:.1f}", f"{large.body_bytes / 1000:.0f}"),
            "met" if is_met else "NOT met",
        )
        if not is_met:
            exceeding.append(f"{name}: {large.worst}")
    return table, exceeding


def bench(
    console: Console, kept: Path | None, *, calls: int, runs: int, lengths: tuple[int, int], is_quick: bool
) -> None:
    """`kept`: a folder for the databases that is used again and never removed; without it nothing is left."""
    home = make_home() if kept is None else kept
    world = World(home)
    try:
        made = Bench(world, console, warm=1 if is_quick else WARM, rounds=1 if is_quick else ROUNDS)
        if not made.file.exists():
            may_start(world)
            world.start()
            seeds = made.play(lengths)
            world.stop()
            asyncio.run(made.copy(seeds, (1, FEW), (1, FEW)))
            asyncio.run(made.analyse())
            made.keep({})
        few = made.kept(FEW) or made.measure(FEW, lengths[0])
        if made.kept(calls) is None:
            asyncio.run(made.copy(None, (FEW + 1, calls), (FEW + 1, runs)))
            made.keep({str(calls): {}})  # they are there, whatever becomes of the measurement
            _compare(console, few, made.measure(calls, lengths[1]), "never analysed")
        asyncio.run(made.analyse())
        _compare(console, few, made.measure(calls, lengths[1]), "analysed")
    finally:
        world.close()
        if kept is None:
            shutil.rmtree(home)


def _compare(console: Console, few: dict[str, Figures], many: dict[str, Figures], title: str) -> None:
    table, exceeding = _table(f"Beside few and beside many, {title}; at most {WITHIN:g} times as much", few, many)
    console.print(table)
    for one in exceeding:
        console.print(f"NOT met, {one}\n")
    console.print(f"{len(few) - len(exceeding)} of {len(few)} addresses met the aim, {title}")


def main() -> None:
    parser = arguments_of("pages", __doc__)
    parser.add_argument("--calls", type=int, help="of the larger database (default 1,000,000; with --quick 3,000)")
    parser.add_argument("--runs", type=int, help="of the larger database (default 100,000; with --quick 2,000)")
    parser.add_argument("--checkpoints", type=int, help="of the longer run (default 20,000; with --quick 400)")
    parser.add_argument("--home", type=Path, help="keep the databases there, and use them again")
    given = parser.parse_args()
    calls, runs, long = (3_000, 2_000, 400) if given.quick else (1_000_000, 100_000, 20_000)
    bench(
        Console(width=None if Console().is_terminal else 170),
        given.home,
        calls=given.calls or calls,
        runs=given.runs or runs,
        lengths=(200, given.checkpoints or long),
        is_quick=given.quick,
    )


if __name__ == "__main__":
    main()
