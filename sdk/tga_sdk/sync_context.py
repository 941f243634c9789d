"""The same context for procedures that are plain functions: they run in a thread, and each method blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any, Generic, TypeVar, Unpack, overload
from uuid import UUID

from pydantic import BaseModel

from tga_sdk.context import Context, Level, Review, StepOptions
from tga_sdk.retry import Retry
from tga_sdk.values import Resume, Tier
from tga_sdk.wrappers import Artifact

S = TypeVar("S")
T = TypeVar("T")


class SyncContext(Generic[S]):
    """`Context` for plain functions. Every method does what the one of `Context` does, and returns when it is done."""

    def __init__(self, ctx: Context[S]) -> None:
        self._ctx = ctx
        self._do = ctx._attempt.threads.wait_for

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._ctx.run_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1. It differs between a run and its replay: for logs, not for decisions."""
        return self._ctx.attempt

    @property
    def key(self) -> str:
        """A key for whatever this body does outside: the same in every attempt of this operation of this run."""
        return self._ctx.key

    @property
    def state(self) -> S:
        """The run's state; see `Context.state`."""
        return self._ctx.state

    def tool(
        self,
        server: str,
        tool: str,
        args: Mapping[str, Any] | BaseModel | None = None,
        *,
        retry: Retry | int | None = None,
        timeout: float | None = None,
        intent: str | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Call a tool through the gateway; see `Context.tool`."""
        return self._do(self._ctx.tool(server, tool, args, retry=retry, timeout=timeout, intent=intent, type=type))

    @overload
    def step(self, name: str, fn: Callable[..., Artifact[T]], *args: Any, **options: Unpack[StepOptions]) -> T: ...

    @overload
    def step(self, name: str, fn: Callable[..., T], *args: Any, **options: Unpack[StepOptions]) -> T: ...

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        retry: Retry | int | None = None,
        timeout: float | None = None,
        tier: Tier = "auto",
        resume: Resume = "snapshot",
        at_most_once: bool = False,
        defer: bool = False,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Run `fn(*args)` and record what it returns; see `Context.step`."""
        return self._do(
            self._ctx.step(
                name,
                fn,
                *args,
                retry=retry,
                timeout=timeout,
                tier=tier,
                resume=resume,
                at_most_once=at_most_once,
                defer=defer,
                type=type,
            )
        )

    def perform(self, kind: str, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A body, and a record of its end; see `Context.perform`."""
        return self._do(self._ctx.perform(kind, name, fn, *args, **options))

    def checkpoint(self, *, name: str = "checkpoint") -> None:
        """Record the state and the log lines so far; see `Context.checkpoint`."""
        self._do(self._ctx.checkpoint(name=name))

    def now(self) -> datetime:
        """The time, as it was when the program first asked here; in UTC."""
        return self._do(self._ctx.now())

    def emit(self, value: Any, *, name: str = "emit") -> None:
        """Show a value to followers of the run; see `Context.emit`."""
        self._do(self._ctx.emit(value, name=name))

    def patched(self, name: str) -> bool:
        """Whether the program is to behave as changed by this patch; see `Context.patched`."""
        return self._do(self._ctx.patched(name))

    def approve(self, message: str, **options: Any) -> bool:
        """Ask a person to approve; see `Context.approve`."""
        return self._do(self._ctx.approve(message, **options))

    def input(self, message: str, **options: Any) -> Any:
        """Ask a person for a value; see `Context.input`."""
        return self._do(self._ctx.input(message, **options))

    def select(self, message: str, options: Sequence[str], **more: Any) -> str:
        """Ask a person to choose one of the options; see `Context.select`."""
        return self._do(self._ctx.select(message, options, **more))

    def review(self, message: str, artifact: Any, **options: Any) -> Review:
        """Ask a person to look at something; see `Context.review`."""
        return self._do(self._ctx.review(message, artifact, **options))

    def sleep(self, seconds: float, *, name: str = "sleep") -> None:
        """Wait; the run holds nothing meanwhile but this thread, and for long nothing at all."""
        self._do(self._ctx.sleep(seconds, name=name))

    def signal(self, name: str, *, type: Any = None, timeout: float | None = None) -> Any:  # noqa: A002
        """The value of the next signal of this name; see `Context.signal`."""
        return self._do(self._ctx.signal(name, type=type, timeout=timeout))

    def call(self, procedure: Any, input: Any = None, **options: Any) -> Any:  # noqa: A002
        """Call another procedure; see `Context.call`."""
        return self._do(self._ctx.call(procedure, input, **options))

    def gather(self, *branches: Callable[[], Any], name: str = "gather") -> list[Any]:
        """Run branches at the same time, each in a thread; see `Context.gather`."""
        return self._do(self._ctx.gather(*branches, name=name))

    def agent(self, *args: Any, **options: Any) -> Any:
        """A durable agent whose `run` blocks; see `Context.agent`."""
        return import_module("tga_sdk.agents").BlockingSession(self._ctx.agent(*args, **options), self._do)

    def model(self, *args: Any, **options: Any) -> Any:
        """A model whose `predict` blocks; see `Context.model`."""
        return import_module("tga_sdk.models").BlockingPredictor(self._ctx.model(*args, **options), self._do)

    def random(self) -> float:
        """A random number from 0 to 1, the same in every attempt."""
        return self._ctx.random()

    def uuid(self) -> UUID:
        """A random id, the same in every attempt."""
        return self._ctx.uuid()

    def log(self, text: str, *, level: Level = "info") -> None:
        """A line for readers of the run; see `Context.log`."""
        self._ctx.log(text, level=level)
