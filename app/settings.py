"""Every setting, its default and its environment variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import SettingInvalid


@dataclass(frozen=True, slots=True)
class Settings:
    """`TGA_HOME`: where state lives. `TGA_DATABASE_URL`: a PostgreSQL server; None means the embedded one.
    `TGA_CONFIG`: servers and tools; None means `tga.toml` in the home directory, else the packaged demonstration."""

    home: Path
    database_url: str | None
    config: Path | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        values = os.environ if environment is None else environment
        home = values.get("TGA_HOME") or "~/.tga"
        config = values.get("TGA_CONFIG")
        return cls(
            home=_path("TGA_HOME", home),
            database_url=values.get("TGA_DATABASE_URL") or None,
            config=_path("TGA_CONFIG", config) if config else None,
        )


def _path(name: str, value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # ~someone who is not here
        raise SettingInvalid(f"{name} is no path", found=f"{value}: {error}") from None
