"""What an agent is, as data: a specification that a program, a Lua procedure or a JSON document can state."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tga_sdk.errors import ValueInvalid

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ToolName = Annotated[str, StringConstraints(pattern=r"^[^.\s]+\.\S+$")]


class AgentSpecification(BaseModel):
    """An agent. `model` is `provider:name` as pydantic-ai names models.

    `tools` are tools of the gateway, `server.tool`; `server.*` is all of a server's. `approve` names those that a
    person approves before they are called, besides what the gateway's policy says. `output_schema` is a JSON schema of
    an object: the agent's output is then a dict of that shape, else it is text.

    `max_turns` bounds the turns of one `run`. `timeout` is in seconds and of one request to the provider; a request
    that runs out of time, or is refused with 429 or 5xx, is sent again up to `retries` times within the same turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: Name
    model: str | None = None
    system_prompt: str | None = None
    tools: tuple[ToolName, ...] = ()
    approve: tuple[ToolName, ...] = ()
    output_schema: dict[str, Any] | None = None
    settings: dict[str, Any] = {}
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 50
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = 120.0
    retries: Annotated[int, Field(ge=0, le=100)] = 4
    stream: bool = False


def agent_specification(said: AgentSpecification | dict[str, Any]) -> AgentSpecification:
    """The specification that a dict states; ValueInvalid names the field that is wrong."""
    if isinstance(said, AgentSpecification):
        return said
    name = said.get("name", "agent")
    try:
        return AgentSpecification.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ValueInvalid(f"agent {name}: {path}: {first['msg']}", where=f"{name}.{path}") from error
