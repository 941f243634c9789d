"""What a client does, written once for both clients.

A *script* is a generator. It yields what is to be done (a Request to send, a Pause to make) and gets what came of it
(a Reply, or Lost when no answer came); what it returns is the result. `Client` performs scripts with blocking calls,
`AsyncClient` with awaited ones. Scripts hold all decisions: what to repeat, when to stop, what an answer means.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from tga_sdk.errors import AnswerInvalid, GatewayError, GatewayUnreachable, TgaError
from tga_sdk.wire import FIRST_PAUSE, LONGEST_PAUSE, parsed, refusal, seconds_of

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
MARGIN: Final = 15.0  # seconds for the gateway's own work, beyond what it was asked to wait
GRACE: Final = 2.5  # seconds for which an answer is waited for after the caller's own time
DEFECTS_MAX: Final = 3  # how often an internal error of the gateway is asked about again
# After these nothing of the request has happened; after every other refusal something may have.
_NOTHING_DONE: Final = frozenset(
    {
        "UNAUTHENTICATED",
        "FORBIDDEN",
        "CALL_DENIED",
        "RUN_START_DENIED",
        "ARGUMENTS_INVALID",
        "SCHEMA_VIOLATION",
        "INPUT_MALFORMED",
        "INPUT_TOO_LARGE",
        "HEADERS_TOO_LARGE",
        "METHOD_NOT_ALLOWED",
        "ROUTE_NOT_FOUND",
        "REQUEST_TIMEOUT",
        "TOOL_NOT_FOUND",
        "TOOL_QUARANTINED",
        "IDEMPOTENCY_KEY_REUSED",
        "IDEMPOTENCY_KEY_RESERVED",
        "IDEMPOTENCY_KEY_MISSING",
        "RATE_LIMITED",
        "TOO_MANY_IN_FLIGHT",
        "GATEWAY_BUSY",
        "STORE_BUSY",
        "STORE_UNAVAILABLE",
        "SHUTTING_DOWN",
        "ALREADY_DECIDED",
    }
)
_NO_WORDS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})  # repeated when no problem document says otherwise

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `patience`: seconds after which it is given up. `bytes_max`: of an answer that may be larger than
    others."""

    method: str
    path: str
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float = 30.0
    bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Watched:
    """Until a run that is followed from this entry on has come to rest, or so many seconds; whatever breaks meanwhile
    ends it, too: who asks looks again."""

    path: str
    after: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` are named in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came. `was_sent`: the gateway may have got the request."""

    reason: str
    was_sent: bool = True


Script: TypeAlias = Generator[Request | Pause | Watched, Reply | Lost | None, T]


@dataclass(slots=True)
class Tries:
    """How one request fares while it is repeated: until when it may be, and what is known of it so far."""

    until: float
    named: str
    may_have_run: bool = False
    last: TgaError | None = None
    last_lost: str = ""
    _pause: float = FIRST_PAUSE
    _defects: int = 0

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def lost(self, lost: Lost) -> None:
        self.may_have_run = self.may_have_run or lost.was_sent
        self.last, self.last_lost = None, lost.reason

    def refused(self, error: GatewayError) -> None:
        self.may_have_run = self.may_have_run or error.code not in _NOTHING_DONE
        self.last, self.last_lost = error, ""

    def admits_repeat_of(self, error: GatewayError) -> bool:
        """Whether the same request may be answered otherwise in a moment."""
        if error.code == "INTERNAL":
            # A defect: what is recorded stands. It may be gone with the next try, but is not waited for.
            self._defects += 1
            return self._defects <= DEFECTS_MAX
        return error.retryable or ("code" not in error.problem and error.status in _NO_WORDS)

    def pause(self, at_least: float = 0.0) -> Pause:
        """How long to wait before the next try; raises what happened last when there is no time for one."""
        seconds = max(at_least, self._pause * random.uniform(0.5, 1.0))  # noqa: S311
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if seconds >= self.left:
            raise self.over()
        return Pause(seconds)

    def over(self) -> TgaError:
        if self.last is not None:
            return self.last
        said = f" ({self.last_lost})" if self.last_lost else ""
        return GatewayUnreachable(
            f"no answer from {self.named} in time{said}; is the gateway running? The same may be asked again"
        )


def asked(
    method: str,
    path: str,
    body: Any = None,
    *,
    tries: Tries,
    query: Mapping[str, Any] | None = None,
    wait: float = 0.0,
    bytes_max: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Script[Reply]:
    """The gateway's answer below 300, however often it takes while there is time; GatewayError when it refuses.

    `wait`: for how long the answer may take, beyond what every answer may.
    """
    content = None if body is None else written(body)
    sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
    given = {name: value for name, value in (query or {}).items() if value is not None}
    target = f"{path}?{urlencode(given)}" if given else path
    while True:
        patience = min(wait + MARGIN, max(0.0, tries.left) + GRACE)
        came = yield Request(method, target, content, sent, patience, bytes_max)
        at_least = 0.0
        if isinstance(came, Reply):
            if came.status < 300:
                if came.status < 200:
                    tries.may_have_run = True
                    raise AnswerInvalid.found(came.status, f"the answer has status {came.status}")
                return came
            error = refusal(came.status, came.content)
            tries.refused(error)
            if not tries.admits_repeat_of(error):
                raise error
            at_least = seconds_of(came.headers.get("retry-after", ""))
        elif isinstance(came, Lost):
            tries.lost(came)
        yield tries.pause(at_least)


def written(body: Any) -> bytes:
    """The bytes of a JSON document; TgaError when it cannot be written."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TgaError(
            f"this cannot be sent as JSON: {error}. Give texts, numbers, booleans, lists and dicts of them",
            code="INPUT_MALFORMED",
        ) from None


def document(reply: Reply) -> dict[str, Any]:
    """The JSON object of an answer; AnswerInvalid when it is none."""
    found = parsed(reply.status, reply.content)
    if not isinstance(found, dict):
        raise AnswerInvalid.found(reply.status, f"the answer is no JSON object: {reply.content[:80]!r}")
    return found


def model(kind: type[M], found: Any, *, status: int = 200) -> M:
    """What was answered, as this type; AnswerInvalid when it does not fit."""
    try:
        return kind.model_validate(found)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "it is nested too deep"}
        where = ".".join(str(part) for part in first["loc"])
        raise AnswerInvalid.found(status, f"the answer is no {kind.__name__}: {where}: {first['msg']}") from None


def path_to(*parts: str) -> str:
    """A path whose parts are names that may hold anything."""
    return "".join(f"/{quote(_part(part), safe=':')}" for part in parts)


def _part(part: str) -> str:
    try:
        part.encode()
    except UnicodeEncodeError:
        raise TgaError("a name has half a character (a lone surrogate)", code="INPUT_MALFORMED") from None
    if part in ("", ".", ".."):  # a path would lead elsewhere
        raise TgaError(f"this is no name or id: {part!r}", code="INPUT_MALFORMED")
    return part
