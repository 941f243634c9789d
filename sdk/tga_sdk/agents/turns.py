"""One turn of an agent: what a model answers to the messages so far, recorded as one checkpoint of kind `turn`.

The turn stands around `Model.request`, the innermost place where pydantic-ai asks a provider. So everything around it
(history processors, output validation, retry prompts, usage limits) runs in the program, in every attempt alike, and a
recorded turn costs nothing: neither a request nor a token.

**What makes a turn the same one:** the agent's name, and what was said: prompts, tool returns, earlier answers. System
prompts and instructions, the model, its settings and the tools on offer do not: they may be computed, tuned or replaced
while a run is under way, and recorded turns stand.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import CompletedStreamedResponse, Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext

from tga_sdk.retry import Retry
from tga_sdk.telemetry import model_request

if TYPE_CHECKING:
    from tga_sdk.context import Context

RESPONSE: Final[TypeAdapter[ModelResponse]] = TypeAdapter(ModelResponse)
ASKED_AGAIN: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_RETRY_AFTER: Final = 60.0
NOT_SAID: Final = frozenset(
    {"timestamp", "metadata"}
)  # of a part: differs from one attempt to the next, or is not sent
TOKENS_CHARS: Final = 400  # of one event
TOKENS_SECONDS: Final = 0.25


@dataclass
class Turns:
    """The turns of one agent within one run of a program.

    `requests` counts those that were sent to the provider in this attempt; recorded turns send none.
    """

    ctx: Context[Any]
    name: str
    retry: Retry
    timeout: float | None
    stream: bool
    requests: int = 0
    _digests: dict[int, tuple[ModelMessage, str]] = field(default_factory=dict)

    async def turn(
        self,
        model: Model,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> ModelResponse:
        """What the model answers: as it is recorded, or asked for now and recorded."""

        async def body() -> dict[str, Any]:
            response, requests = await self._ask(model, messages, settings, parameters, run_context)
            return {
                "response": RESPONSE.dump_python(response, mode="json", exclude_none=True),
                "cost": cost_of(response),
                "requests": requests,
            }

        found = await self.ctx.perform("turn", self.name, body, given={"said": self.said(messages)})
        return RESPONSE.validate_python(found["response"])

    def said(self, messages: Sequence[ModelMessage]) -> str:
        """A digest of what was said so far. Earlier messages are digested once, the last one may still change."""
        whole = hashlib.sha256()
        last = len(messages) - 1
        for place, message in enumerate(messages):
            known = self._digests.get(id(message))
            if known is not None and place < last:
                whole.update(known[1].encode())
                continue
            digest = _digest_of(message)
            if place < last:
                self._digests[id(message)] = (message, digest)  # the message is kept, so its id stays its own
            whole.update(digest.encode())
        return whole.hexdigest()

    async def _ask(
        self,
        model: Model,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None,
    ) -> tuple[ModelResponse, int]:
        """One answer; requests that ran out of time or were turned away are sent again, within this turn."""
        tokens = Tokens(self.ctx, self.name) if self.stream else None
        tried = 0
        while True:
            tried += 1
            self.requests += 1
            try:
                with model_request(
                    model, settings, messages, run_id=self.ctx.run_id, stream=tokens is not None
                ) as span:
                    response = await self._request(model, messages, settings, parameters, run_context, tokens)
                    if span is not None:
                        span.answered(response)
                return response, tried
            except (TimeoutError, ModelAPIError) as error:
                pause = _pause_after(error, self.retry, tried)
                if pause is None:
                    raise
                said = str(error) or f"no answer within {self.timeout:g} s"
                self.ctx.log(
                    f"agent {self.name}: request {tried} to {model.model_id}: {said[:300]}; again in {pause:.1f} s",
                    level="warning",
                )
            await asyncio.sleep(pause)

    async def _request(
        self,
        model: Model,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None,
        tokens: Tokens | None,
    ) -> ModelResponse:
        """One request to the provider; TimeoutError when it takes too long."""
        async with asyncio.timeout(self.timeout):
            if tokens is None:
                return await model.request(messages, settings, parameters)
            await tokens.begin()
            async with model.request_stream(messages, settings, parameters, run_context) as answer:
                async for event in answer:
                    await tokens.take(event)
                await tokens.show()
                return answer.get()


@dataclass
class Tokens:
    """Text as it comes, shown to followers of the run. It is no value of the journal: the turn's answer is.

    What an earlier attempt of the same turn has shown stands, because the journal only grows; the new attempt's text
    begins anew after it, with `attempt` and `request` saying whose it is.
    """

    ctx: Context[Any]
    name: str
    _text: str = ""
    _request: int = 0
    _shown_at: float = 0.0

    async def begin(self) -> None:
        if self._request == 0:
            await self._pass_what_was_shown()
        self._request += 1
        self._text, self._shown_at = "", time.monotonic()

    async def take(self, event: Any) -> None:
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            self._text += event.part.content
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            self._text += event.delta.content_delta
        if self._text and (len(self._text) >= TOKENS_CHARS or time.monotonic() - self._shown_at >= TOKENS_SECONDS):
            await self.show()

    async def show(self) -> None:
        if self._text:
            shown = {"agent": self.name, "attempt": self.ctx.attempt, "request": self._request, "text": self._text}
            self._text, self._shown_at = "", time.monotonic()
            await self.ctx.emit(shown, name=f"{self.name}.tokens")
            self.ctx._attempt.pipe.start()  # under way now, not with the turn's end; not waited for

    async def _pass_what_was_shown(self) -> None:
        """Step over the events that an attempt before this one has recorded inside the same turn."""
        frame = self.ctx._frame()
        for _ in range(frame.attempt.journal.performed_inside(frame.scope.address)):
            await self.ctx.emit(None, name=f"{self.name}.tokens")


class TurnModel(WrapperModel):
    """A model whose every request is a recorded turn."""

    def __init__(self, wrapped: Model, turns: Turns) -> None:
        super().__init__(wrapped)
        self._turns = turns

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        return await self._turns.turn(self.wrapped, messages, model_settings, model_request_parameters)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        """For `event_stream_handler` and the like: the turn as recorded, told as a stream when it is whole."""
        response = await self._turns.turn(self.wrapped, messages, model_settings, model_request_parameters, run_context)
        yield CompletedStreamedResponse(response, model_request_parameters=model_request_parameters, replay_events=True)


def cost_of(response: ModelResponse) -> dict[str, str] | None:
    """What the answer cost, by the prices that pydantic-ai knows; None for a model that it has no price of."""
    try:
        return {"amount": str(response.cost().total_price), "currency": "USD"}
    except (LookupError, ValueError, AssertionError):
        return None


def _digest_of(message: ModelMessage) -> str:
    [document] = ModelMessagesTypeAdapter.dump_python([message], mode="json")
    parts = [
        {name: value for name, value in part.items() if name not in NOT_SAID}
        for part in document["parts"]
        if part["part_kind"] != "system-prompt"
    ]
    said = json.dumps([document["kind"], parts], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def _pause_after(error: Exception, retry: Retry, tried: int) -> float | None:
    """Seconds until the same request is sent again; None when it is not."""
    if tried > retry.retries:
        return None
    if isinstance(error, ModelHTTPError):
        if error.status_code not in ASKED_AGAIN:
            return None
        said = (error.headers or {}).get("retry-after", "")
        if said.isdigit():
            return min(float(said), LONGEST_RETRY_AFTER)
    return retry.pause(tried)
