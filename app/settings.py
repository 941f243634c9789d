"""Every setting, its default and its environment variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from app.core.errors import SettingInvalid
from app.core.limits import PROCESSES_MAX


@dataclass(frozen=True, slots=True)
class Settings:
    """`TGA_HOME`: where state lives. `TGA_DATABASE_URL`: a PostgreSQL server; None means the embedded one.
    `TGA_CONFIG`: servers and tools; None means `tga.toml` in the home directory, else the packaged demonstration.
    `TGA_KEYS`: the folder of signing and sealing keys; None means `keys` in the home directory. `TGA_HOST` and
    `TGA_PORT`: where the gateway listens. `TGA_URL` and `TGA_API_KEY`: which gateway commands talk to, and as whom;
    without them the one on this machine, with the key in `admin.key` of the home directory. `TGA_PROCESSES`: how many
    processes serve the port."""

    home: Path
    database_url: str | None
    config: Path | None
    keys: Path
    host: str
    port: int
    url: str
    api_key: str | None
    processes: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        values = os.environ if environment is None else environment
        home = values.get("TGA_HOME") or "~/.tga"
        config = values.get("TGA_CONFIG")
        keys = values.get("TGA_KEYS")
        host, port = values.get("TGA_HOST") or "127.0.0.1", _port(values.get("TGA_PORT") or "8420")
        return cls(
            home=_path("TGA_HOME", home),
            database_url=values.get("TGA_DATABASE_URL") or None,
            config=_path("TGA_CONFIG", config) if config else None,
            keys=_path("TGA_KEYS", keys) if keys else _path("TGA_HOME", home) / "keys",
            host=host,
            port=port,
            url=(values.get("TGA_URL") or f"http://{f'[{host}]' if ':' in host else host}:{port}").rstrip("/"),
            api_key=values.get("TGA_API_KEY") or None,
            processes=_processes(values.get("TGA_PROCESSES") or "1"),
        )

    @property
    def config_file(self) -> Path:
        """TGA_CONFIG, else tga.toml in the home directory, else the packaged demonstration."""
        if self.config is not None:
            return self.config
        own = self.home / "tga.toml"
        return own if own.exists() else Path(str(resources.files("app.demo").joinpath("tga.toml")))

    @property
    def admin_key_file(self) -> Path:
        return self.home / "admin.key"


def _path(name: str, value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # ~someone who is not here
        raise SettingInvalid(f"{name} is no path", found=f"{value}: {error}") from None


def _port(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 <= int(value[:6]) <= 65535:
        raise SettingInvalid("TGA_PORT is no port", expected="0 to 65535", found=value)
    return int(value)


def _processes(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:6]) <= PROCESSES_MAX:
        raise SettingInvalid("TGA_PROCESSES is no number of processes", expected=f"1 to {PROCESSES_MAX}", found=value)
    return int(value)
