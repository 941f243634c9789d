"""A model for tests of agents: it says what a script says, counts what it was asked, and fails when it is told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic import BaseModel

from tga_sdk.errors import ExtraMissing

try:
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
    from pydantic_ai.usage import RequestUsage
except ImportError as error:
    raise ExtraMissing(module="pydantic_ai", extra="pydantic-ai") from error

Turn = str | dict[str, Any] | BaseModel | ToolCallPart | Sequence[str | ToolCallPart] | Exception
Scripted = Turn | Callable[[list[ModelMessage]], Turn]


def call(tool: str, /, **arguments: Any) -> ToolCallPart:
    """A tool call in a script: `call("bank.charge", amount=5)`, or the name of a Python tool."""
    return ToolCallPart(tool_name=tool.replace(".", "__", 1), args=arguments)


class ScriptedModel(FunctionModel):
    """A model that answers by a script; give it to an agent as its model.

        ScriptedModel(["Let me look.", call("docs.search", query="tea")], "Tea is a drink.")

    Turn n of a conversation is the script's n-th: a text, a tool call or a list of both, a dict or model for a
    structured output, an exception to raise, or a function of the messages that returns one of these. Which turn it is
    follows from the messages, not from how often this object was asked: a worker that takes a run over goes on where
    the conversation is. After the last turn it raises AssertionError.

    `requests` has the messages of every request, failed ones included; a recorded turn makes none.
    """

    def __init__(self, *turns: Scripted, name: str = "scripted", tokens_per_turn: tuple[int, int] = (10, 5)) -> None:
        super().__init__(function=self._answer, stream_function=self._stream, model_name=name)
        self.turns = turns
        self.requests: list[list[ModelMessage]] = []
        self._tokens = tokens_per_turn
        self._failures: list[Exception] = []

    def fail(self, *failures: Exception | int) -> None:
        """The next requests fail so, one each; a number is an HTTP status of the provider's."""
        self._failures += [
            ModelHTTPError(one, self.model_name, {"error": "as scripted"}) if isinstance(one, int) else one
            for one in failures
        ]

    async def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        parts = self._parts(messages, info)
        given, said = self._tokens
        return ModelResponse(
            parts=parts, model_name=self.model_name, usage=RequestUsage(input_tokens=given, output_tokens=said)
        )

    async def _stream(
        self, messages: list[ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        for number, part in enumerate(self._parts(messages, info)):
            if isinstance(part, TextPart):
                for word in part.content.split(" "):
                    yield word if word is part.content else f"{word} "
            else:
                yield {number: DeltaToolCall(part.tool_name, json.dumps(part.args), tool_call_id=part.tool_call_id)}

    def _parts(self, messages: list[ModelMessage], info: AgentInfo) -> list[TextPart | ToolCallPart]:
        self.requests.append(list(messages))
        if self._failures:
            raise self._failures.pop(0)
        number = sum(isinstance(message, ModelResponse) for message in messages)
        if number >= len(self.turns):
            raise AssertionError(f"the script has {len(self.turns)} turns, and turn {number + 1} was asked for")
        turn = self.turns[number]
        said: Any = turn(messages) if callable(turn) else turn
        if isinstance(said, Exception):
            raise said
        if isinstance(said, dict | BaseModel):
            plain = said if isinstance(said, dict) else said.model_dump(mode="json")
            if not info.output_tools:
                return [TextPart(json.dumps(plain))]
            return [ToolCallPart(info.output_tools[0].name, plain, tool_call_id=f"turn-{number + 1}-output")]
        whole = [said] if isinstance(said, str | ToolCallPart) else list(said)
        return [
            TextPart(one)
            if isinstance(one, str)
            else ToolCallPart(one.tool_name, one.args, tool_call_id=f"turn-{number + 1}-call-{place}")
            for place, one in enumerate(whole, 1)
        ]
