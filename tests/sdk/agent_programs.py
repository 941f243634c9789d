"""A program with an agent whose model stands behind HTTP, for workers that are processes of their own."""

from __future__ import annotations

import os
from typing import Any

import httpx2
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from tga_sdk import Context, procedure


async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(os.environ["MODEL_URL"] + path, json={**body, "pid": os.getpid()})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


async def answered(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    turn = 1 + sum(isinstance(message, ModelResponse) for message in messages)
    found = await ask("/turn", {"turn": turn})
    parts = [
        TextPart(one) if isinstance(one, str) else ToolCallPart(one["tool"], one["args"], tool_call_id=one["id"])
        for one in found["parts"]
    ]
    return ModelResponse(parts=parts, model_name="served", usage=RequestUsage(input_tokens=7, output_tokens=3))


async def note(text: str) -> str:
    """Note something."""
    return str((await ask("/note", {"text": text}))["noted"])


@procedure(name="paid-research")
async def research(ctx: Context[None], question: str) -> dict[str, Any]:
    agent = ctx.agent("researcher", model=FunctionModel(answered), tools=[note, "bank.charge"])
    return {"output": await agent.run(question), "requests": agent.usage.requests, "tokens": agent.usage.input_tokens}
