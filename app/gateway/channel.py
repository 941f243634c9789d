"""What a supervisor and one of its processes tell each other, and the connections that go with it.

A pair of unix sockets that keeps messages apart (SOCK_SEQPACKET). A message is a JSON object and may carry open files
(SCM_RIGHTS): connections of clients go to a process, and idle ones come back from one that retires. When one side ends,
however it ends, the other reads the end of the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import orjson

from app.core.errors import SettingInvalid

Message = dict[str, Any]
OnMessage = Callable[[Message, list[int]], None]

FILES_PER_MESSAGE_MAX: Final = 64
_MESSAGE_BYTES_MAX: Final = 16_384
_BUFFER_BYTES: Final = 1 << 20
_GONE: Final = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
_PAUSE_S: Final = 0.05
_TAKEN_AT_ONCE: Final = 64  # messages, before the loop does something else


def open_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends. SettingInvalid where the system has no such sockets."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        raise SettingInvalid(
            "several processes cannot be run on this system",
            expected="unix sockets that keep messages apart (Linux has them)",
            found=error,
            remedy="Leave --processes and TGA_PROCESSES out: one process does all.",
        ) from None
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return ours, theirs


class Channel:
    """One end. `ended` is set when the other side has closed it or is gone.

    What cannot be sent at once waits here, in order; `has_room` says whether anything waits. Files are the channel's
    from the moment that they are given to it: it closes them when they are sent, or when there is no process to send
    to.
    """

    def __init__(self, end: socket.socket, on_message: OnMessage) -> None:
        # Set here for good.
        end.setblocking(False)
        self._socket = end
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        # What waits to be sent, with its files; `_flush` takes from it.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop.add_reader(end.fileno(), self._read)

    @property
    def has_room(self) -> bool:
        return not self._unsent and not self.ended.is_set()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """In order. Nothing is raised when the other side is gone: `ended` says so."""
        raw = orjson.dumps(message)
        if self.ended.is_set():
            close_files(files)
            return
        self._unsent.append((raw, list(files)))
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Close this end; the other reads that it has ended."""
        if self._socket.fileno() >= 0:
            self._end()
            self._socket.close()

    def _flush(self) -> None:
        while self._unsent:
            raw, files = self._unsent[0]
            try:
                socket.send_fds(self._socket, [raw], files, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket.fileno(), self._go_on)
                return
            except OSError as error:
                if error.errno in _GONE:  # the reader has not noticed yet
                    self._end()
                else:  # no memory, or too many files are on their way: that passes
                    self._loop.call_later(_PAUSE_S, self._flush)
                return
            self._unsent.popleft()
            close_files(files)

    def _go_on(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self._flush()

    def _read(self) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                raw, files, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES_MAX, FILES_PER_MESSAGE_MAX)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                raw, files = b"", []
            if not raw:
                close_files(files)
                self._end()
                return
            for file in files:
                os.set_inheritable(file, False)
            self._on_message(orjson.loads(raw), list(files))
            if self.ended.is_set():
                return

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        while self._unsent:
            close_files(self._unsent.popleft()[1])


def close_files(files: Iterable[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


def file_with(content: bytes) -> int:
    """A file without a name that holds this: what is too large for a message goes with it."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        return os.dup(file.fileno())


def read_file(descriptor: int) -> bytes:
    """All of a file that came with a message; it stays open."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
