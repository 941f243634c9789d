"""Declaring durable programs: `@procedure`, and `@task` for a function that is plain otherwise.

A program is known by name, version and digest. The digest is that of the function's syntax tree, without comments,
docstring and decorators, so that it changes when the function does something else, and not when it is only explained
better. Functions that it calls are not part of it: change the version when their operations change.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tga_sdk.annotations import result_type
from tga_sdk.errors import ProcedureInvalid
from tga_sdk.frames import current_frame
from tga_sdk.retry import Retry

P = ParamSpec("P")
R = TypeVar("R")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")  # of versions, and of steps of a flow
PROCEDURE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a run may take, how it is retried, and what is kept of it. Times are in milliseconds."""

    timeout_ms: int | None = None
    checkpoint_timeout_ms: int | None = None
    retry: Retry = field(default_factory=lambda: Retry(0))
    park_after: int = 5
    retention: Literal["keep", "delete_on_success"] = "keep"

    def document(self) -> dict[str, Any]:
        """As the gateway is told."""
        return {
            "timeout_ms": self.timeout_ms,
            "checkpoint_timeout_ms": self.checkpoint_timeout_ms,
            "retry": self.retry.document(),
            "park_after": self.park_after,
            "retention": self.retention,
        }


@dataclass(frozen=True)
class Procedure(Generic[P, R]):
    """A durable program. Called directly it is the plain function: `await onboard(ctx, input)`, for tests of its parts.

    Guaranteed of a run of it: what is recorded is not executed again, whatever crashes. Not guaranteed: that the body
    between its operations is executed once; it is executed again in every attempt, and must do the same each time.
    """

    name: str
    version: str
    fn: Callable[P, R]
    digest: str
    accepts: tuple[str, ...] = ()
    input_type: Any = None
    output_type: Any = None
    state_type: type[BaseModel] | None = None
    policy: Policy = field(default_factory=Policy)
    description: str | None = None
    tags: tuple[str, ...] = ()
    triggers: tuple[dict[str, Any], ...] = ()
    takes_input: bool = True

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the body is a coroutine; others run in a thread."""
        return inspect.iscoroutinefunction(self.fn)

    @property
    def source(self) -> str:
        """Where the function stands: file and line."""
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else self.name

    def registration(self) -> dict[str, Any]:
        """What a gateway is told of it when a worker starts."""
        said = {
            "name": self.name,
            "version": self.version,
            "program_digest": self.digest,
            "description": self.description,
            "input_schema": _schema_of(self.input_type),
            "output_schema": _schema_of(self.output_type),
            "state_schema": _schema_of(self.state_type),
            "policy": self.policy.document(),
            "tags": list(self.tags),
            "triggers": list(self.triggers),
        }
        return {name: value for name, value in said.items() if value is not None}

    def offer(self) -> dict[str, Any]:
        """What a worker says that it can run."""
        return {
            "name": self.name,
            "version": self.version,
            "program_digest": self.digest,
            "accepts": list(self.accepts),
        }


@overload
def procedure(fn: Callable[P, R], /) -> Procedure[P, R]: ...
@overload
def procedure(
    *,
    name: str | None = None,
    version: str = "1",
    accepts: Sequence[str] = (),
    state: type[BaseModel] | None = None,
    timeout_ms: int | None = None,
    checkpoint_timeout_ms: int | None = None,
    retry: Retry | int | None = None,
    park_after: int = 5,
    retention: Literal["keep", "delete_on_success"] = "keep",
    tags: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Procedure[P, R]]: ...
def procedure(
    fn: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    accepts: Sequence[str] = (),
    state: type[BaseModel] | None = None,
    timeout_ms: int | None = None,
    checkpoint_timeout_ms: int | None = None,
    retry: Retry | int | None = None,
    park_after: int = 5,
    retention: Literal["keep", "delete_on_success"] = "keep",
    tags: Sequence[str] = (),
) -> Procedure[P, R] | Callable[[Callable[P, R]], Procedure[P, R]]:
    """Make a function `(ctx, input) -> output` a durable program.

    `async def` takes a `Context`; a plain `def` runs in a thread and takes a `SyncContext`, whose methods block. Input
    and output are checked against their annotations, and a wrong one is refused with the place that is wrong. The
    state is that of `Context[State]`, or `state=`.

    `version` and the function's digest are pinned to a run when it starts; a worker goes on with runs of the same
    digest, and with those of the versions in `accepts`. `timeout_ms` is for the whole run, `checkpoint_timeout_ms` for
    the time without a word of progress, after which another attempt is made. `retry` is for errors of the body itself:
    what an operation has recorded as failed stays failed until a person retries the run.
    """
    policy = Policy(timeout_ms, checkpoint_timeout_ms, Retry.of(retry), park_after, retention)

    def declare(fn: Callable[P, R]) -> Procedure[P, R]:
        return declared(fn, name=name, version=version, accepts=accepts, state=state, policy=policy, tags=tags)

    return declare if fn is None else declare(fn)


def declared(
    fn: Callable[P, R],
    *,
    name: str | None = None,
    version: str = "1",
    accepts: Sequence[str] = (),
    state: type[BaseModel] | None = None,
    policy: Policy | None = None,
    tags: Sequence[str] = (),
    digest: str | None = None,
    triggers: Iterable[dict[str, Any]] = (),
) -> Procedure[P, R]:
    """A procedure of this function, with its types as annotated. ProcedureInvalid names what cannot be run."""
    name = name or fn.__name__.replace("_", "-").strip("-")
    given: Sequence[tuple[str, object, re.Pattern[str]]] = (
        ("name", name, PROCEDURE_NAME),
        ("version", version, NAME),
    )
    for what, said, pattern in given:
        if not isinstance(said, str) or not pattern.fullmatch(said):
            raise ProcedureInvalid(f"{what} of a procedure: expected {pattern.pattern}, found {said!r}")
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not 1 <= len(positional) <= 2 or len(positional) != len(parameters):
        raise ProcedureInvalid(
            f"{name}: expected a function (ctx, input) or (ctx), found {inspect.signature(fn)}; "
            "several values go into one pydantic model"
        )
    try:
        hints = typing.get_type_hints(fn)
    except NameError as error:
        raise ProcedureInvalid(
            f"{name}: {error}: its annotations must be importable there (not under TYPE_CHECKING alone)"
        ) from error
    takes_input = len(positional) == 2
    return Procedure(
        name=name,
        version=version,
        fn=fn,
        digest=digest or digest_of(fn),
        accepts=tuple(accepts),
        input_type=_known(hints.get(positional[1].name)) if takes_input else None,
        output_type=_known(result_type(fn)),
        state_type=state or _state_of(hints.get(positional[0].name)),
        policy=policy or Policy(),
        description=inspect.getdoc(fn),
        tags=tuple(tags),
        triggers=tuple(triggers),
        takes_input=takes_input,
    )


class Task(Generic[P, R]):
    """A plain function that is durable when a run calls it. Its callers do not change.

    Called inside a run (from a sync procedure, or awaited in an async one) it is one recorded step: executed once,
    and after a crash its recorded result is returned. Called anywhere else it is the function as it was, and nothing
    is recorded. A worker can also serve it as a program of its own: `client.start(task, {...})` with its arguments by
    name.

    Not guaranteed: that a body that was under way in a crash is not executed again; `at_most_once=True` says so.
    """

    def __init__(self, fn: Callable[P, R], *, name: str | None, version: str, options: dict[str, Any]) -> None:
        self.fn = fn
        self.name = name or fn.__name__.replace("_", "-").strip("-")
        self.version = version
        self.options = options
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__
        self.__wrapped__ = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        frame = current_frame()
        if frame is None:
            return self.fn(*args, **kwargs)
        given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        return typing.cast("R", frame.attempt.perform_task(self, given, lambda: self.fn(*args, **kwargs)))

    @property
    def procedure(self) -> Procedure[Any, Any]:
        """This task as a program: its input is an object of its arguments."""
        fn: Callable[..., Any] = self.fn
        options = {"type": result_type(fn), **self.options}

        async def run_async(ctx: Any, input: Any) -> Any:  # noqa: A002
            return await ctx.step(self.name, lambda: fn(**input), **options)

        def run(ctx: Any, input: Any) -> Any:  # noqa: A002
            return ctx.step(self.name, lambda: fn(**input), **options)

        body = run_async if inspect.iscoroutinefunction(fn) else run
        made = declared(body, name=self.name, version=self.version, digest=digest_of(fn))
        return Procedure(**{**made.__dict__, "description": inspect.getdoc(fn), "output_type": _known(result_type(fn))})


@overload
def task(fn: Callable[P, R], /) -> Task[P, R]: ...
@overload
def task(
    *,
    name: str | None = None,
    version: str = "1",
    retry: Retry | int | None = None,
    timeout: float | None = None,
    at_most_once: bool = False,
) -> Callable[[Callable[P, R]], Task[P, R]]: ...
def task(
    fn: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    retry: Retry | int | None = None,
    timeout: float | None = None,
    at_most_once: bool = False,
) -> Task[P, R] | Callable[[Callable[P, R]], Task[P, R]]:
    """Make a plain function durable without a change for its callers; see `Task` for what that means."""
    options = {"retry": retry, "timeout": timeout, "at_most_once": at_most_once}

    def make(fn: Callable[P, R]) -> Task[P, R]:
        return Task(fn, name=name, version=version, options=options)

    return make if fn is None else make(fn)


def procedure_of(given: Any) -> Procedure[Any, Any]:
    """The procedure itself, or that of a task, flow or whatever has one."""
    found = given if isinstance(given, Procedure) else getattr(given, "procedure", None)
    if not isinstance(found, Procedure):
        raise ProcedureInvalid(
            f"expected a function with @procedure or @task, or a Flow; found {type(given).__name__} "
            f"{getattr(given, '__name__', '')}".strip()
        )
    return found


def digest_of(fn: Callable[..., Any]) -> str:
    """SHA-256 of what the function does: of its syntax tree, the same in every version of Python and for every comment.

    Where no source can be found (a function made at run time), of its compiled code, which differs between versions.
    """
    fn = inspect.unwrap(fn)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        code = fn.__code__
        said = repr((code.co_code, code.co_names, [c for c in code.co_consts if not inspect.iscode(c)]))
    else:
        said = _shape(tree.body[0])
    return hashlib.sha256(said.encode()).hexdigest()


def _shape(node: Any) -> str:
    """A syntax tree as text: without positions, decorators, docstrings, and what is empty."""
    if isinstance(node, list):
        return "[" + ",".join(_shape(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "type_comment", "type_ignores", "kind") or value is None or value == []:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(node):
            value = value[1:]
        parts.append(f"{name}={_shape(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _has_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _state_of(annotation: Any) -> type[BaseModel] | None:
    """S of `Context[S]`, when it is a model."""
    for argument in typing.get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return None


def _known(annotation: Any) -> Any:
    return None if annotation in (None, Any, inspect.Parameter.empty) or isinstance(annotation, TypeVar) else annotation


def _schema_of(type_: Any) -> dict[str, Any] | None:
    """The JSON schema of a type; None where it has none, and then only the worker checks it."""
    if type_ is None or type_ is type(None):
        return None
    try:
        return TypeAdapter(type_).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError):
        return None
