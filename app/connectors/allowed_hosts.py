"""Which hosts a URL that a program wrote may lead to: what reading the web and the callbacks of questions share.

1. The URL is http or https, without a user, and its host and port are among those that the operator allows.
2. No address that the host's name has is of a private network, of this machine or of none, unless the operator named
   the host for that. The connection goes to the addresses that were looked at: the name is not resolved again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from yarl import URL

from app.connectors.answers import plain
from app.connectors.http_connection import NotConnected


class AddressRefused(NotConnected):
    """Not the network's fault: trying again cannot help."""


class AllowedHosts:
    """`table`: of tga.toml, where the operator names them."""

    def __init__(self, allowed: Sequence[str], private: Sequence[str], *, table: str) -> None:
        self._allowed = frozenset(host.lower() for host in allowed)
        self._private = frozenset(host.lower() for host in private)
        self._table = table

    def verified(self, text: str) -> URL:
        """The URL; ValueError says what was expected and what was found."""
        try:
            url = URL(text)
            host, port = (url.host or "").lower(), url.port
        except ValueError:
            raise ValueError("expected a URL") from None
        if url.scheme not in ("http", "https") or not host or url.user is not None or port is None:
            raise ValueError("expected a URL http://host/... or https://host/..., without a user")
        is_usual = port == (443 if url.scheme == "https" else 80)
        if f"{host}:{port}" not in self._allowed and not (is_usual and host in self._allowed):
            allowed = ", ".join(sorted(self._allowed)) or "none is"
            raise ValueError(f"expected a URL of an allowed host ({allowed}), found {plain(host, 253)}:{port}")
        return url.with_fragment(None)

    def verify_address(self, host: str, address: str) -> None:
        """AddressRefused for an address of this host that must not be reached."""
        found = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(found, "ipv4_mapped", None) or found
        if (not mapped.is_global or mapped.is_multicast) and host.lower() not in self._private:
            raise AddressRefused(
                f"expected a public address of {host}, found one of a private network; the operator names such hosts "
                f"in private_hosts of {self._table}"
            )
