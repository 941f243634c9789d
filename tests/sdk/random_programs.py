"""Programs made by chance: a tree of operations as data, and the procedure that performs it.

What a program does follows from its tree alone, so that two gateways must come to the same journal.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from tga_sdk import Artifact, Context, OperationError, Retry, procedure
from tga_sdk.frames import current_frame
from tga_sdk.testing import Tool, ToolFailed

TOO_MUCH = 900
"""What the policy of both gateways refuses: to charge more than this."""
ALWAYS = 1_000  # more tries than there are
DEEP = 3
SNAPSHOTS = ["auto snapshot", "inline snapshot", "artifact snapshot", "event snapshot"]
RECOMPUTED = ["auto recompute", "transient recompute", "event recompute", "artifact recompute"]


class Maker:
    """Makes trees. `answers` and `signals`: what people are to say, by the name of the operation.

    A name is of one program alone: whoever attends a program sees the children of others, and leaves them be.
    """

    def __init__(self, seed: int, *, crashes: bool = False) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._crashes = crashes
        self._numbers = itertools.count(1)
        self.answers: dict[str, Any] = {}
        self.signals: dict[str, Any] = {}
        self.asked_when_retried: set[str] = set()  # an answer that came before would be counted as a part of the try

    def program(self) -> list[dict[str, Any]]:
        tree = self._block(0, self._rng.randint(2, 5))
        if "left" in str(tree):  # of a run that fails the children go on: somebody may retry it
            _catch_all(tree)
        return tree

    def _block(self, depth: int, size: int) -> list[dict[str, Any]]:
        return [self._operation(depth) for _ in range(size)]

    def _operation(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        flat = ["tool", "tool", "ask", "sleep", "signal", "state", "state", "marks", "leaf", "leaf"]
        kind = rng.choice(flat if depth >= DEEP else [*flat, "step", "step", "gather", "call", "child", "left"])
        name = f"{kind}-{next(self._numbers)}-of-{self._seed}"
        made: dict[str, Any] = {"kind": kind, "name": name, "catch": rng.random() < 0.9}
        more: dict[str, Any] = getattr(self, f"_{kind}")(made["name"], depth)
        return made | more

    def _tool(self, name: str, depth: int) -> dict[str, Any]:
        tool, amount = self._rng.choice(["charge", "charge", "fail", "balance", "nothing"]), self._rng.randrange(1_000)
        return {"tool": tool, "args": {"amount": amount} if tool == "charge" else {}, "retry": self._rng.randrange(3)}

    def _ask(self, name: str, depth: int) -> dict[str, Any]:
        how = self._rng.choice(["approve", "input", "select", "expires", "default"])
        if how not in ("expires", "default"):
            self.answers[name] = {"approve": self._rng.random() < 0.5, "input": 7, "select": "b"}[how]
        return {"how": how}

    def _sleep(self, name: str, depth: int) -> dict[str, Any]:
        return {"seconds": self._rng.choice([0, 0.01, 0.05])}

    def _signal(self, name: str, depth: int) -> dict[str, Any]:
        is_sent = self._rng.random() < 0.8
        if is_sent:
            self.signals[name] = {"of": name}
        return {"timeout": None if is_sent else 0.01}

    def _state(self, name: str, depth: int) -> dict[str, Any]:
        return {"how": self._rng.choice(["set", "append", "remove", "many"])}

    def _marks(self, name: str, depth: int) -> dict[str, Any]:
        return {"which": self._rng.sample(["checkpoint", "now", "emit", "patched", "log"], 2)}

    def _leaf(self, name: str, depth: int) -> dict[str, Any]:
        tier, resume = self._rng.choice([*SNAPSHOTS, *RECOMPUTED]).split()
        options: dict[str, Any] = {"tier": tier, "resume": resume}
        if resume == "snapshot":
            # Whether a crash comes within such a step is chance where branches are under way, and so is its end.
            options["at_most_once"] = self._rng.random() < 0.2 and not self._crashes
            options["defer"] = not options["at_most_once"] and self._rng.random() < 0.2
        failing = self._failing()
        if resume == "recompute":
            failing["fails"] = 0  # it runs in every attempt, and is tried once in each
        value = self._rng.choice([1, "ä", None, [1.5, {"a": []}], "x" * 40_000])
        return {
            "value": value if tier != "inline" or value != "x" * 40_000 else 2,
            "options": options,
            **failing,
        }

    def _failing(self) -> dict[str, Any]:
        return {"fails": self._rng.choice([0, 0, 0, 1, 2]), "retry": self._rng.choice([0, 0, 1, 2])}

    def _step(self, name: str, depth: int) -> dict[str, Any]:
        return {"inside": self._block(depth + 1, self._rng.randint(1, 3)), **self._failing()}

    def _gather(self, name: str, depth: int) -> dict[str, Any]:
        branches = [self._block(depth + 1, self._rng.randint(1, 3)) for _ in range(self._rng.randint(1, 3))]
        return {"branches": branches}

    def _call(self, name: str, depth: int) -> dict[str, Any]:
        return {"inside": self._block(depth + 1, self._rng.randint(1, 2))}

    def _child(self, name: str, depth: int) -> dict[str, Any]:
        return {"inside": self._block(DEEP, self._rng.randint(1, 2))}

    def _left(self, name: str, depth: int) -> dict[str, Any]:
        """A step that fails while its child is at work: it leaves the child behind, or takes it up again. What is left
        behind nobody answers, so the step fails each time, also when one around it is tried again."""
        is_taken_up = self._rng.random() < 0.5
        if is_taken_up:
            self.answers[name] = True
            self.asked_when_retried.add(name)
        asking = {"kind": "ask", "name": name, "catch": True, "how": "approve"}
        return {"inside": [asking], "fails": 1 if is_taken_up else ALWAYS, "retry": int(is_taken_up)}


def _catch_all(tree: Any) -> None:
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        _catch_all(part)
    if isinstance(tree, dict) and "catch" in tree:
        tree["catch"] = True


@procedure(name="random-program")
async def performing(ctx: Context[Any], tree: list[dict[str, Any]]) -> Any:
    ctx.state.setdefault("seen", [])
    return await _all(ctx, tree)


async def _all(ctx: Context[Any], tree: list[dict[str, Any]]) -> list[Any]:
    said = []
    for operation in tree:
        try:
            said.append(await _one(ctx, operation))
        except OperationError as error:
            if not operation["catch"]:
                raise
            said.append([type(error).__name__, error.type, error.retryable])
    return said


async def _one(ctx: Context[Any], said: dict[str, Any]) -> Any:
    name = said["name"]
    match said["kind"]:
        case "tool":
            return await ctx.tool("bank", said["tool"], said["args"], retry=said["retry"])
        case "ask":
            return await _ask(ctx, name, said["how"])
        case "sleep":
            return await ctx.sleep(said["seconds"], name=name)
        case "signal":
            return await ctx.signal(name, timeout=said["timeout"])
        case "state":
            return _change(ctx, name, said["how"])
        case "marks":
            return await _mark(ctx, name, said["which"])
        case "leaf":
            return await ctx.step(name, _leaf, name, said, retry=_soon(said), type=Any, **said["options"])
        case "step":

            async def body() -> Any:
                found = await _all(ctx, said["inside"])
                _fail_for_now(name, said)
                return found

            return await ctx.step(name, body, retry=_soon(said))
        case "left":

            async def leave() -> Any:
                return await _leave(ctx, said)

            return await ctx.step(name, leave, retry=_soon(said))
        case "gather":

            def branch(tree: list[dict[str, Any]]) -> Any:
                async def run() -> Any:
                    return await _all(ctx, tree)

                return run

            return await ctx.gather(*[branch(one) for one in said["branches"]], name=name)
        case "call":
            return await ctx.call(performing, said["inside"], name=name)
        case _:
            return await ctx.call(performing, said["inside"], child=True, name=name)


def _soon(said: dict[str, Any]) -> Retry:
    return Retry(said["retry"], first=0.001, longest=0.001)


def _fail_for_now(name: str, said: dict[str, Any]) -> None:
    """By the number of the try that the journal has: a body that a crash has repeated does the same again."""
    frame = current_frame()
    assert frame is not None
    if frame.attempt.journal.try_of(frame.scope.address) <= said["fails"]:
        raise ValueError(f"{name} fails for now")


async def _leave(ctx: Context[Any], said: dict[str, Any]) -> Any:
    """Fail as soon as the child has begun, as a time-out would; in the last try wait for it."""
    frame = current_frame()
    assert frame is not None
    path, attempt = frame.next_path, frame.attempt
    # This body goes on beside the child: the run is not suspended before it has failed.
    attempt.waiting.count_branches(1)
    child = asyncio.create_task(ctx.call(performing, said["inside"], child=True, name=said["name"]))
    try:
        while attempt.journal.look(path) is None and not child.done():
            await asyncio.sleep(0.001)
        _fail_for_now(said["name"], said)
    except BaseException:
        child.cancel()
        await asyncio.wait([child])
        raise
    finally:
        attempt.waiting.count_branches(-1)
    return await child


async def _leaf(name: str, said: dict[str, Any]) -> Any:
    _fail_for_now(name, said)
    value = said["value"]
    return Artifact(value) if said["options"]["tier"] == "artifact" else value


async def _ask(ctx: Context[Any], name: str, how: str) -> Any:
    match how:
        case "approve":
            return await ctx.approve("May it?", context={"of": name}, name=name)
        case "input":
            return await ctx.input("How many?", type=int, name=name)
        case "select":
            return await ctx.select("Which?", ["a", "b"], name=name)
        case "default":
            return await ctx.approve("May it?", timeout=0.01, default=True, name=name)
        case _:
            return await ctx.approve("May it?", timeout=0.01, name=name)


def _change(ctx: Context[Any], name: str, how: str) -> Any:
    if how == "append":
        ctx.state["seen"].append(name)
    elif how == "remove":
        ctx.state.pop(next((one for one in ctx.state if one != "seen"), "nothing"), None)
    elif how == "many":
        ctx.state[name] = {}
        for number in range(300):
            ctx.state[name][f"n{number}"] = number
    else:
        ctx.state[name] = {"value": [1]}
    return len(ctx.state)


async def _mark(ctx: Context[Any], name: str, which: list[str]) -> None:
    for one in which:
        if one == "checkpoint":
            await ctx.checkpoint(name=name)
        elif one == "now":
            await ctx.now()
        elif one == "emit":
            await ctx.emit({"of": name}, name=name)
        elif one == "patched":
            await ctx.patched(name)
        else:
            ctx.log(f"at {name}")


def bank() -> dict[str, Any]:
    """The tools of the tests' bank, as functions, with the policy of the test."""
    numbers = itertools.count(1)

    def charge(amount: int) -> dict[str, Any]:
        return {"charge_id": f"ch_{next(numbers)}", "amount": amount}

    def fail() -> None:
        said = {"error": "this tool always fails"}
        raise ToolFailed("the server answered 422 Unprocessable Entity", code="HTTP_422", output=said)

    return {
        "bank.charge": Tool(charge, denied=lambda call: DENIED if call.arguments["amount"] > TOO_MUCH else None),
        "bank.fail": Tool(fail, read_only=True),
        "bank.balance": Tool(lambda: {"balance": 0}, read_only=True),
    }


DENIED = "forbidden by too-much"
POLICY = f"""
@id("tools") permit(principal, action == Action::"call", resource);
@id("unattended") permit(principal, action == Action::"call_unattended", resource);
@id("start") permit(principal, action == Action::"start", resource);
@id("too-much") forbid(principal, action == Action::"call", resource)
when {{ context.arguments has amount && context.arguments.amount > {TOO_MUCH} }};
"""
