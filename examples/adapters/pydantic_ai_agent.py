"""An agent of pydantic-ai with the tools of a gateway. The model is scripted, so it runs without any account:

pip install 'tga-sdk[pydantic-ai]'
python examples/adapters/pydantic_ai_agent.py      # while `make run` runs, with TGA_HOME=.tga
"""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tga_sdk.adapters.pydantic_ai import GatewayToolset

TURNS = [
    [ToolCallPart("bank_charge", {"amount": "much"})],  # refused: the gateway says what it expects
    [ToolCallPart("bank_charge", {"amount": 42})],
    [ToolCallPart("bank_refund", {"amount": 42})],  # a person has to approve this
]


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """What a model would say: the next turn of the script, then what it was told last."""
    number = sum(isinstance(message, ModelResponse) for message in messages)
    if number < len(TURNS):
        return ModelResponse(parts=TURNS[number])
    told = [part.content for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    return ModelResponse(parts=[TextPart("\n".join(str(one) for one in told))])


async def main() -> None:
    agent = Agent(FunctionModel(scripted), toolsets=[GatewayToolset(only=["bank"])])
    print((await agent.run("Charge 42, then refund it.")).output)


if __name__ == "__main__":
    asyncio.run(main())
