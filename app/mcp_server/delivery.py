"""Whether an answer arrived: not that it was written, but that the other side's system has acknowledged every byte.

Written is not arrived: a connection may be dead for minutes before this side hears of it, and a client that has lost
its network comes back over another one. What a proxy acknowledges in the client's place, and what the client's own
program does with the bytes, cannot be seen from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import Final

from starlette.types import Scope

from app.core.limits import MCP_DELIVERY_WAIT_MS
from app.edge.protocol import TRANSPORT

_POLL_FIRST_S: Final = 0.0005
_POLL_MAX_S: Final = 0.05
_TCP_CLOSE: Final = 7  # as the kernel counts the states of a connection


class Delivery:
    """Of one answer. Made before the answer is written, because a connection that is closed can be asked nothing: the
    kernel's socket is kept open until it has told."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self._transport = transport
        self._socket: socket.socket | None = None
        kept = None if transport is None else transport.get_extra_info("socket")
        if kept is not None and kept.family in (socket.AF_INET, socket.AF_INET6) and hasattr(termios, "TIOCOUTQ"):
            with contextlib.suppress(OSError):
                self._socket = socket.socket(fileno=os.dup(kept.fileno()))

    @classmethod
    def of(cls, scope: Scope) -> Delivery:
        return cls(scope.get(TRANSPORT))

    async def arrived(self) -> bool:
        """Wait for the other side's word; False when it did not come in time, or the connection ended without it.

        Where the system cannot be asked, True if the connection still stands.
        """
        try:
            async with asyncio.timeout(MCP_DELIVERY_WAIT_MS / 1000):
                return await self._acknowledged()
        except TimeoutError:
            return False
        finally:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _acknowledged(self) -> bool:
        pause_s = _POLL_FIRST_S
        while self._transport is not None and self._transport.get_write_buffer_size():
            if self._transport.is_closing():
                return False  # the rest never reached the system
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _POLL_MAX_S)
        if self._socket is None:
            return self._transport is None or not self._transport.is_closing()
        while (unacknowledged := self._unacknowledged()) != 0:
            if unacknowledged is None or self._is_over():
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _POLL_MAX_S)
        return True

    def _unacknowledged(self) -> int | None:
        """Bytes that the client has not acknowledged; None where the system does not tell."""
        if self._socket is None:
            return None
        try:
            raw = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return None
        return int(struct.unpack("i", raw)[0])

    def _is_over(self) -> bool:
        if self._socket is None or not hasattr(socket, "TCP_INFO"):
            return self._socket is None
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
        except OSError:
            return True
