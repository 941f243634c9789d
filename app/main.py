"""Composition root: the settings, the command, and the gateway for those that open one."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from app.cli.command import command
from app.cli.context import Context
from app.cli.pipes import forgive_closed_pipes
from app.core.errors import TgaError
from app.settings import Settings

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway


def open_gateway(settings: Settings) -> AbstractAsyncContextManager[Gateway]:
    """A gateway as app/gateway/wiring.py puts it together."""
    # Here, because it takes longer to load than most commands take to run.
    from app.gateway import wiring

    return wiring.open_gateway(settings)


def run() -> None:
    """The command `tga`."""
    forgive_closed_pipes()
    try:
        settings = Settings.from_environment()
    except TgaError as error:
        from app.cli.running import show_error

        sys.exit(show_error(error))
    command(obj=Context(settings, open_gateway))


if __name__ == "__main__":
    run()
