"""What a command works with: the settings, and a way to open the gateway that main.py wires."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.settings import Settings

if TYPE_CHECKING:  # every command loads this module, and few open a gateway
    from app.gateway.wiring import Gateway


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    open_with: Callable[[Settings], AbstractAsyncContextManager[Gateway]]

    def open_gateway(self) -> AbstractAsyncContextManager[Gateway]:
        return self.open_with(self.settings)
