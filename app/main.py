"""Composition root: settings and event loop in, exit code out."""

from __future__ import annotations

from app.cli.command import command
from app.settings import Settings


def run() -> None:
    """The command `tga`."""
    command(obj=Settings.from_environment())


if __name__ == "__main__":
    run()
