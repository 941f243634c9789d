"""Which gateway a program talks to, and as whom: as the command `tga` finds it.

`TGA_URL` and `TGA_API_KEY`; without them the gateway on this machine (`TGA_HOST`, `TGA_PORT`), with the key that its
first start wrote to `admin.key` in `TGA_HOME` (`~/.tga`; `make run` uses `./.tga`). That key goes to no other machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tga_sdk.errors import SettingInvalid

_KEY_CHARS_MAX: Final = 8_192
_KEY_FILE_BYTES_MAX: Final = 512


def gateway_urls(given: str | Sequence[str] | None, environment: Mapping[str, str] | None = None) -> list[str]:
    """The addresses of the gateways, without a slash at the end; SettingInvalid when one is no address."""
    values = os.environ if environment is None else environment
    if given is None:
        host, port = values.get("TGA_HOST") or "127.0.0.1", values.get("TGA_PORT") or "8420"
        given = values.get("TGA_URL") or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    urls = [given] if isinstance(given, str) else list(given)
    if not urls:
        raise SettingInvalid("no gateway is named: give its address, as http://127.0.0.1:8420")
    for url in urls:
        _verify_url(url)
    return [url.rstrip("/") for url in urls]


def api_key(given: str | None, urls: Sequence[str], environment: Mapping[str, str] | None = None) -> str | None:
    """The API key: what is given, else TGA_API_KEY, else the one of the gateway on this machine; None when there is
    none. SettingInvalid when it is no key."""
    values = os.environ if environment is None else environment
    key = given if given is not None else values.get("TGA_API_KEY") or None
    if key is not None:
        if not key or not key.isascii() or not key.isprintable() or " " in key or len(key) > _KEY_CHARS_MAX:
            raise SettingInvalid("the API key is no key: it is one line of printable ASCII without spaces")
        return key
    if not all(_is_this_machine(url, values) for url in urls):
        return None
    try:
        home = Path(values.get("TGA_HOME") or "~/.tga").expanduser()
        with (home / "admin.key").open("rb") as file:
            found = file.read(_KEY_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except (OSError, RuntimeError):
        return None
    return found if found and found.isascii() and found.isprintable() and " " not in found else None


def _verify_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    except (ValueError, AttributeError, TypeError):
        is_usable = is_plain = False
    if not is_usable or not is_plain or any(character.isspace() for character in url):
        raise SettingInvalid("this is no address of a gateway; expected http://host:port, and nothing secret in it")


def _is_this_machine(url: str, values: Mapping[str, str]) -> bool:
    host = urlsplit(url).hostname or ""
    if host in ("localhost", values.get("TGA_HOST") or "127.0.0.1"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
