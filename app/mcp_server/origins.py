"""Against web pages: which Host and Origin a request may name.

A page that makes its own domain point to this machine (DNS rebinding) sends that domain as Host; a page of another
site says so in Origin. Programs send no Origin. An address in numbers cannot be rebound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from app.config.wording import shown
from app.core.errors import Forbidden


class Origins:
    """`hosts`: names under which the gateway is reached, beside localhost and addresses in numbers. `origins`: pages
    that may ask, beside those of this machine; whole, as browsers send them."""

    def __init__(self, *, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset({"localhost", *(host.lower() for host in hosts)})
        self._origins = frozenset(origin.lower() for origin in origins)

    def verify(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for a request that a web page has made in its visitor's name."""
        host = headers.get("host", "")
        name = _host_in(f"//{host}")
        if name is None or (name not in self._hosts and not _is_address(name)):
            raise Forbidden(
                "the Host header names no host of this gateway",
                expected="an address, localhost, or one of `mcp.allowed_hosts` in tga.toml",
                found=shown(host),
                remedy="Reach the gateway under one of these, or have the name added to the configuration.",
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_allowed(origin.lower()):
            raise Forbidden(
                "the Origin header names a page that may not ask here",
                expected="none, a page of this machine, or one of `mcp.allowed_origins` in tga.toml",
                found=shown(origin),
                remedy="Use a program, or have the page's origin added to the configuration.",
            )

    def _is_allowed(self, origin: str) -> bool:
        if origin in self._origins:
            return True
        name = _host_in(origin)
        return name == "localhost" or (name is not None and _is_loopback(name))


def _host_in(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
        return parts.hostname.lower() if parts.hostname and "@" not in parts.netloc else None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback
