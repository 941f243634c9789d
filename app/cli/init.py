"""`tga init`: a configuration and a policy to start from."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from app.cli.running import context_of, run
from app.cli.showing import output
from app.core.errors import SettingInvalid


def add_to(application: typer.Typer) -> None:
    application.command("init")(init_command)


def write_config(home: Path, *, force: bool) -> Path:
    """Write `tga.toml` and `policy.cedar` into `home` and return the first one's path.

    Without `force` nothing that is there is touched: if either is, SettingInvalid is raised and nothing is written. The
    policy is written first, because the configuration names it.
    """
    path = home / "tga.toml"
    texts = {
        home / "policy.cedar": resources.files("app.demo").joinpath("policy.cedar").read_bytes(),
        path: resources.files("app.cli").joinpath("init.toml").read_bytes(),
    }
    for file in texts:
        if not force and os.path.lexists(file):
            raise SettingInvalid(f"{file} is there already", remedy="Say --force to replace it, or edit it.")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, text in texts.items():
            with file.open("wb" if force else "xb") as opened:
                opened.write(text)
    except OSError as error:
        raise SettingInvalid(f"{home} cannot be written to", found=error.strerror) from None
    return path


def init_command(
    context: typer.Context, force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False
) -> None:
    """Write a commented tga.toml and policy.cedar into TGA_HOME, to start from."""
    settings = context_of(context).settings

    async def work() -> bool:
        path = write_config(settings.home, force=force)
        output.print(f"Wrote {path} and {path.with_name('policy.cedar')}. Edit them, then `tga serve`.", markup=False)
        return True

    run(work())
