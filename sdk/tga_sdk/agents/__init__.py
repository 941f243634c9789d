"""Durable agents over pydantic-ai: every turn of the model and every tool call is recorded, and none is made twice.

Needs the extra `pydantic-ai`: `pip install 'tga-sdk[pydantic-ai]'`.
"""

from tga_sdk.errors import ExtraMissing

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as error:
    raise ExtraMissing(module="pydantic_ai", extra="pydantic-ai") from error

from tga_sdk.agents.agent import AgentSession, BlockingSession, DurableAgent, agent_of, cost, durable, provide_model
from tga_sdk.agents.specs import AgentSpecification, agent_specification

__all__ = [
    "AgentSession",
    "AgentSpecification",
    "BlockingSession",
    "DurableAgent",
    "agent_of",
    "agent_specification",
    "cost",
    "durable",
    "provide_model",
]
