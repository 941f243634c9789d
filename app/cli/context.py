"""What a command works with: the settings, and a way to open the gateway that main.py wires."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from app.connectors.registry import Registry
from app.domain.tga.runtime import TgaRuntime
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Gateway:
    runtime: TgaRuntime
    traces: PostgresTraces
    registry: Registry
    sessions: Sessions


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    open_gateway: Callable[[], AbstractAsyncContextManager[Gateway]]
