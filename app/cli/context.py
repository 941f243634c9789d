"""What a command works with: the settings, and a way to open the gateway that main.py wires."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from app.settings import Settings

if TYPE_CHECKING:  # every command loads this module, and few open a gateway
    from app.api.edge import Edge
    from app.connectors.registry import Registry
    from app.connectors.webhooks import Webhooks
    from app.domain.tga.ports import Clock
    from app.domain.tga.runtime import TgaRuntime
    from app.mcp_server.server import McpEndpoint
    from app.policy_file import PolicyFile
    from app.postgres.sequencer import Sequencer
    from app.postgres.sessions import Sessions
    from app.postgres.system import PostgresSystemLog
    from app.postgres.traces import PostgresTraces


@dataclass(frozen=True, slots=True)
class Gateway:
    runtime: TgaRuntime
    traces: PostgresTraces
    registry: Registry
    sessions: Sessions
    system: PostgresSystemLog
    policy: PolicyFile
    webhooks: Webhooks
    sequencer: Sequencer
    clock: Clock
    edge: Edge
    mcp: McpEndpoint


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    open_gateway: Callable[[], AbstractAsyncContextManager[Gateway]]


def config_path(settings: Settings) -> Path:
    """TGA_CONFIG, else tga.toml in the home directory, else the packaged demonstration."""
    if settings.config is not None:
        return settings.config
    own = settings.home / "tga.toml"
    return own if own.exists() else Path(str(resources.files("app.demo").joinpath("tga.toml")))
