"""The sockets that a gateway listens on."""

from __future__ import annotations

import socket

from app.core.errors import SettingInvalid


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of the host; port 0 takes any, the same for all."""
    bound: list[socket.socket] = []
    try:
        addresses = dict.fromkeys(socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE))
        for family, kind, protocol, _, address in addresses:
            # With its protocol: asyncio turns Nagle's delay off only where it sees that this is TCP.
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], bound[0].getsockname()[1] or address[1], *address[2:]))
    except OSError as error:
        for one in bound:
            one.close()
        raise SettingInvalid(
            f"the gateway cannot listen on port {port} of {host}",
            expected="a free port of this machine",
            found=error.strerror,
            remedy="End what listens there, or choose another with TGA_PORT (and TGA_HOST).",
        ) from None
    return bound
