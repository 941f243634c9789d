"""A small bank, as a tool server over HTTP: an example of how to honour an idempotency key.

    python -m app.demo.tool_server --port 8421 --book bank.jsonl

What makes a key safe is one thing: that the key and the effect become durable in the same write. Here the effect *is* a
line of the book, and the line holds the key, the arguments and the answer. So a server that is killed at any moment
has either executed and remembers it, or has not executed. In a database it would be one transaction.

    a key never seen          execute, then answer
    a key being executed      409: the caller asks again later
    a key that was executed   the first answer, byte for byte
    the same key, other arguments   422: not executed

The gateway sends the same key for every attempt of one call. `--ignore-keys` shows a server that does not look at it:
there a call whose answer is lost is executed again.

It stands alone: it imports nothing of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = dict[str, Any]
Key = tuple[str, str]  # a key belongs to its tool: another tool may be called with the same one

_MS_MAX = 600_000


class Refused(Exception):
    """A definite no: a 4xx answer, and nothing was executed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Book:
    """Every request and every execution, a JSON line each, in a file that survives the process."""

    def __init__(self, path: Path) -> None:
        self.requests: Counter[Key] = Counter()
        self.executions: list[dict[str, Any]] = []
        self.executed: dict[Key, dict[str, Any]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._load()

    def _load(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as file:
            whole, _, torn = file.read().rpartition(b"\n")
        # A line without its end was being written when the machine stopped: it was not answered, it did not happen.
        if torn:
            os.ftruncate(self._file, len(whole) + 1 if whole else 0)
        for line in whole.splitlines():
            self._remember(json.loads(line))

    def note_request(self, tool: str, key: str | None, tool_call_id: str | None, traceparent: str | None) -> None:
        """Only for counting and tracing: it need not survive a power failure."""
        line = {"event": "request", "tool": tool, "idempotency_key": key, "tool_call_id": tool_call_id}
        self._append({**line, "traceparent": traceparent})

    def execute(
        self, tool: str, key: str | None, tool_call_id: str | None, arguments: dict[str, Any], answer: Answer
    ) -> str:
        """Make the effect, its key and its answer durable, together; return the answer as it will always be sent."""
        body = json.dumps(answer)
        self._append(
            {
                "event": "execution",
                "tool": tool,
                "idempotency_key": key,
                "tool_call_id": tool_call_id,
                "arguments": arguments,
                "answer": body,
            }
        )
        os.fsync(self._file)  # before anyone is told
        return body

    def _append(self, line: dict[str, Any]) -> None:
        line["at"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        written = json.dumps(line).encode() + b"\n"
        while written:
            written = written[os.write(self._file, written) :]
        self._remember(line)

    def _remember(self, line: dict[str, Any]) -> None:
        tool, key = line["tool"], line["idempotency_key"]
        if line["event"] == "request":
            if key is not None:
                self.requests[tool, key] += 1
            return
        self.executions.append(line)
        if key is not None:
            self.executed.setdefault((tool, key), line)

    def balance(self) -> int:
        sign = {"refund": -1, "refund_soon": -1}
        return sum(sign.get(line["tool"], 1) * line["arguments"].get("amount", 0) for line in self.executions)


class Bank:
    """The tools. Write tools go through `_write`, which honours the key; read tools change nothing."""

    def __init__(self, book: Book, *, ignore_keys: bool, latency_ms: int) -> None:
        self._book = book
        self._ignore_keys = ignore_keys
        self._latency_ms = latency_ms
        self._executing: set[Key] = set()
        self._reads: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "balance": lambda arguments: {"balance": self._book.balance()},
            "charge_status": self._charge_status,
            "fail": self._fail,
        }
        self._writes: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "charge": self._charge,
            "slow_charge": self._charge,
            "flaky": self._charge,
            "pay_card": self._pay_card,
            "refund": self._refund,
            "refund_soon": self._refund,
        }

    async def handle(self, request: web.Request) -> web.Response:
        tool = request.match_info["tool"]
        key = request.headers.get("Idempotency-Key")
        call_id = request.headers.get("TGA-Tool-Call-Id")
        self._book.note_request(tool, key, call_id, request.headers.get("traceparent"))
        await asyncio.sleep(self._latency_ms / 1000)
        try:
            arguments = json.loads(await request.read())
            if not isinstance(arguments, dict):
                raise Refused(400, "the body must be a JSON object")
            if tool in self._reads:
                body = json.dumps(self._reads[tool](arguments))
            elif tool in self._writes:
                body = await self._write(tool, key, call_id, _bookable(tool, arguments))
            else:
                raise Refused(404, f"there is no tool {tool}")
        except Refused as refused:
            return _json(json.dumps({"error": str(refused)}), status=refused.status)
        except ValueError:
            return _json(json.dumps({"error": "the body is not JSON"}), status=400)
        return _json(body)

    async def _write(self, tool: str, key: str | None, call_id: str | None, arguments: dict[str, Any]) -> str:
        if self._ignore_keys:
            await self._prepare(tool, key, arguments)
            return self._book.execute(tool, key, call_id, arguments, self._writes[tool](arguments))
        if key is None:
            raise Refused(400, "this tool needs an Idempotency-Key")
        first = self._book.executed.get((tool, key))
        if first is not None:
            if first["arguments"] != arguments:
                raise Refused(422, "this key was used with other arguments")
            return str(first["answer"])
        if (tool, key) in self._executing:
            raise Refused(409, "this key is being executed")
        self._executing.add((tool, key))
        try:
            await self._prepare(tool, key, arguments)
            # No await between here and the durable line: no request can see the key half executed.
            return self._book.execute(tool, key, call_id, arguments, self._writes[tool](arguments))
        finally:
            self._executing.discard((tool, key))

    async def _prepare(self, tool: str, key: str | None, arguments: dict[str, Any]) -> None:
        if tool == "slow_charge":
            await asyncio.sleep(_whole(arguments, "ms", at_most=_MS_MAX) / 1000)
        if tool == "flaky" and self._book.requests[tool, key or ""] <= _whole(arguments, "fail_times", at_most=1000):
            raise Refused(_whole(arguments, "status", at_most=599, at_least=400), "not this time")

    def _charge(self, arguments: dict[str, Any]) -> Answer:
        return {"charge_id": self._next_id("ch"), "amount": _amount(arguments)}

    def _pay_card(self, arguments: dict[str, Any]) -> Answer:
        return {**self._charge(arguments), "card": f"ends in {arguments['card_ends_in']}"}

    def _refund(self, arguments: dict[str, Any]) -> Answer:
        return {"refund_id": self._next_id("rf"), "amount": _amount(arguments)}

    def _charge_status(self, arguments: dict[str, Any]) -> Answer:
        key = str(arguments.get("idempotency_key"))
        for tool in ("charge", "slow_charge", "flaky"):
            if (tool, key) in self._executing:
                raise Refused(409, "this key is being executed")  # "not executed" would not stay true
            line = self._book.executed.get((tool, key))
            if line is not None:
                return {"executed": True, "output": json.loads(line["answer"])}
        return {"executed": False}

    def _fail(self, arguments: dict[str, Any]) -> Answer:
        status = _whole({"status": 422, **arguments}, "status", at_most=499, at_least=400)
        raise Refused(status, "this tool always fails")

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{len(self._book.executions) + 1}"


def _bookable(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they may stand in the book: a card number may not, so nothing after this point has it."""
    if tool != "pay_card":
        return arguments
    rest = dict(arguments)
    card = rest.pop("card", None)
    if not isinstance(card, str) or not card.isascii() or not card.isdigit() or not 12 <= len(card) <= 19:
        raise Refused(422, "card must be a string of 12 to 19 digits")
    return {**rest, "card_ends_in": card[-4:]}


def _amount(arguments: dict[str, Any]) -> int:
    return _whole(arguments, "amount", at_most=2**53 - 1)


def _whole(arguments: dict[str, Any], name: str, *, at_most: int, at_least: int = 0) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise Refused(422, f"{name} must be a whole number from {at_least} to {at_most}")
    return value


def _json(body: str, *, status: int = 200) -> web.Response:
    return web.Response(text=body, status=status, content_type="application/json")


async def serve(bank: Bank, *, host: str, port: int) -> None:
    server = web.Application()
    server.router.add_post("/tools/{tool}", bank.handle)
    # A caller that hangs up does not stop an execution: that is what makes an outcome unknown.
    runner = web.AppRunner(server, access_log=None, handler_cancellation=False)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    bound = runner.addresses[0]
    sys.stdout.write(f"http://{bound[0]}:{bound[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.demo.tool_server", description="A small bank.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8421, help="0: any free one; the URL is printed")
    parser.add_argument("--book", type=Path, required=True, help="the file that remembers executions")
    parser.add_argument("--latency-ms", type=int, default=0, help="wait before every answer")
    parser.add_argument("--ignore-keys", action="store_true", help="execute every request")
    options = parser.parse_args()
    bank = Bank(Book(options.book), ignore_keys=options.ignore_keys, latency_ms=options.latency_ms)
    try:
        asyncio.run(serve(bank, host=options.host, port=options.port))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
