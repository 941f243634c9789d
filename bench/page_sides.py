"""One real gateway on a database of its own, with so many calls and runs in it, and one who asks it for pages."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from app.postgres.sessions import GATEWAY_ROLE
from bench.cost import measuring_session
from bench.page_addresses import addresses
from bench.page_stock import add_calls, add_runs, even_out, mark_seeds, of_places, take_up
from tests.cli.hand_worker import HandWorker, ask, complete, fail, may_start, step, suspend
from tests.cli.world import World, wait_for

_EXPLAIN: Final = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_timing": "off",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_format": "json",
}
# Small tables are cheaper to read whole than by their indexes, which says nothing of how an index grows.
_BY_INDEX: Final = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}


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
            if error.code == 429:  # faster than a principal's rate: medians are of requests that were answered at once
                error.close()
                time.sleep(1)
                return self.ask(path)
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

    def settled(self) -> list[tuple[str, int]]:
        """As `new`, once nothing more is written: the last statements of a request are told of after its answer."""
        found: list[tuple[str, int]] = []
        while True:
            time.sleep(0.05)
            new = self.new()
            if not new:
                return found
            found += new

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


class Side:
    """A gateway and a database with so many calls, runs, and entries of the longest run."""

    def __init__(self, home: Path, console: Console, *, calls: int, runs: int, long: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.world, self.console = World(home), console
        self.calls, self.runs, self.long = calls, runs, long
        self.ids: dict[str, str] = {}
        self.key = ""
        self.file = home / "pages.json"
        self.is_made = self.file.exists()
        if self.is_made:
            self.ids, self.key = json.loads(self.file.read_text())

    # What is there.
    def _play(self) -> dict[str, str]:
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
        self.ids["long"] = f"long-{self.long}"
        self._start(self.ids["long"])
        worker.lease()
        for first in range(1, self.long, 50):
            worker.put(*(step(str(n), n, name=f"step_{n % 7}") for n in range(first, min(first + 50, self.long))))
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

    def make(self) -> None:
        may_start(self.world)
        self.world.start()
        seeds = self._play()
        self.world.stop()
        asyncio.run(self._copy(seeds, is_newest=False))

    def finish(self) -> None:
        """The newest calls, which are to be the newest of both sides."""
        asyncio.run(self._copy(None, is_newest=True))
        self.file.write_text(json.dumps([self.ids, self.key]))

    async def _copy(self, seeds: dict[str, str] | None, *, is_newest: bool) -> None:
        async with measuring_session(self.world.admin_url) as session:
            if seeds is not None:
                await mark_seeds(session, seeds)
                await add_runs(session, self.runs, self.console.print)
            await add_calls(session, self.calls, self.console.print, is_newest=is_newest)
            await take_up(session, self.console.print)
            if is_newest:
                await even_out(session, self.calls, self.console.print)
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
    def buffers(self, *, only: str, warm: int, by_index: bool) -> dict[str, tuple[int, str]]:
        """Of each address by name, and the statement that touches most. `by_index`: where no table is read whole."""
        settings = {**_EXPLAIN, **(_BY_INDEX if by_index else {})}
        asyncio.run(self._set(settings))
        visitor = self.open()
        try:
            statements = Statements(self.world._postgres.log_file)
            time.sleep(3)
            unasked = {text for text, _ in statements.new()}
            paths = self.paths(visitor)
            return {
                name: _touched(visitor, path, statements, unasked, warm) for name, path in paths.items() if only in name
            }
        finally:
            self.world.stop()
            asyncio.run(self._set(settings, is_reset=True))

    def paths(self, visitor: Visitor) -> dict[str, str]:
        async def found() -> dict[str, Any]:
            async with measuring_session(self.world.admin_url) as session:
                return await of_places(session)

        return addresses(visitor.json, self.ids, self.long, asyncio.run(found()))

    def open(self) -> Visitor:
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

    def spent(self) -> tuple[float, float]:
        """Milliseconds of the gateway and of its database until now."""
        database = self.world._postgres.postmaster_pid()
        if self.world.gateway is None or database is None:
            raise RuntimeError("the gateway or its database is gone")
        return cpu_ms(self.world.gateway.pid), cpu_ms(database)


def _touched(visitor: Visitor, path: str, statements: Statements, unasked: set[str], warm: int) -> tuple[int, str]:
    for _ in range(warm):
        visitor.ask(path)
    statements.settled()
    visitor.ask(path)
    asked = [(text, buffers) for text, buffers in statements.settled() if text not in unasked]
    worst = max(asked, key=lambda one: one[1], default=("", 0))
    return sum(buffers for _, buffers in asked), f"{worst[1]} of {' '.join(worst[0].split())[:400]}"
