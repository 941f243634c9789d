"""An agent of the OpenAI Agents SDK with the tools of a gateway. The model is scripted, so it runs without any account:

pip install 'tga-sdk[openai-agents]'
python examples/adapters/openai_agent.py      # while `make run` runs, with TGA_HOME=.tga
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from tga_sdk.adapters.openai_agents import gateway_tools

TURNS = [("bank_charge", {"amount": "much"}), ("bank_charge", {"amount": 42}), ("bank_refund", {"amount": 42})]


class Scripted(Model):
    """What a model would say: the next turn of the script, then what it was told."""

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:
        told = [item["output"] for item in input if item.get("type") == "function_call_output"]
        if len(told) < len(TURNS):
            name, args = TURNS[len(told)]
            call_id = f"call_{uuid.uuid4().hex}"  # as a real model's: unique by itself
            output: Any = ResponseFunctionToolCall(
                type="function_call", call_id=call_id, name=name, arguments=json.dumps(args)
            )
        else:
            text = ResponseOutputText(type="output_text", text="\n".join(told), annotations=[])
            output = ResponseOutputMessage(
                id="message", type="message", role="assistant", status="completed", content=[text]
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(name="teller", model=Scripted(), tools=await gateway_tools(only=["bank"]))
    print((await Runner.run(agent, "Charge 42, then refund it.")).final_output)


if __name__ == "__main__":
    asyncio.run(main())
