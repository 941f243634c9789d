"""A tool server as a child process: its pipes, what it complained of, and its end with the gateway's.

It gets what every program needs of the environment and what its configuration names; nothing else of the gateway's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from app.connectors.intake import Intake, Stream
from app.connectors.mcp import child_guard
from app.core.limits import MCP_STDERR_BYTES_KEPT, MCP_STOP_GRACE_MS

_INHERITED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
_CHUNK_BYTES: Final = 65_536


class Child:
    """A running child. `stop` ends it and all that it started; so does the gateway's death (child_guard)."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, stderr: Stream) -> None:
        self._process = process
        self._lifeline = lifeline
        self._stderr = bytearray()
        self._complaints = asyncio.create_task(self._keep_stderr(stderr))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        inherit: Mapping[str, str],
        intake: Intake | None = None,
    ) -> Child:
        """Raises OSError when not even the guard can be started; a command that cannot be is an early end."""
        needed = {name: inherit[name] for name in _INHERITED if name in inherit}
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                child_guard.__file__,
                str(theirs),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,
                env=needed | dict(environment),
                cwd=folder,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        if process.stdin is not None:
            # `drained` is to mean that nothing is left in this process's memory.
            process.stdin.transport.set_write_buffer_limits(high=0)
        return cls(process, ours, (intake or Intake()).stream())

    @property
    def pid(self) -> int:
        """Of its guard."""
        return self._process.pid

    @property
    def is_writable(self) -> bool:
        stdin = self._process.stdin
        return stdin is not None and not stdin.is_closing() and self._process.returncode is None

    @property
    def has_unwritten(self) -> bool:
        stdin = self._process.stdin
        return stdin is not None and stdin.transport.get_write_buffer_size() > 0

    def write(self, data: bytes) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(data)

    async def drained(self) -> None:
        """Wait until all that was written before has left; OSError when it never will."""
        if self._process.stdin is not None:
            await self._process.stdin.drain()

    async def read(self) -> bytes:
        """The next bytes of its output; empty at the end."""
        return await self._process.stdout.read(_CHUNK_BYTES) if self._process.stdout is not None else b""

    def stderr_tail(self) -> str:
        """The last of what it complained of. It may hold what the server knows: for operators, never for a log."""
        return self._stderr.decode("utf-8", "replace")

    async def ended(self) -> str:
        """How it ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MCP_STOP_GRACE_MS / 1000):
                await self._process.wait()
        code = self._process.returncode
        return "its output ended" if code is None else f"it ended with code {code}"

    async def stop(self) -> None:
        """Close its input, as MCP asks; then end it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MCP_STOP_GRACE_MS / 1000):
                    await self._process.wait()
        finally:
            os.close(self._lifeline)  # from here on it is the guard's work, and certain
            await asyncio.shield(self._reap())

    async def _reap(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(child_guard.GRACE_S + MCP_STOP_GRACE_MS / 1000):
                await self._process.wait()
        self._complaints.cancel()
        await asyncio.gather(self._complaints, return_exceptions=True)
        transport = getattr(self._process, "_transport", None)  # nothing public closes the pipes of what escaped
        if transport is not None:
            transport.close()

    async def _keep_stderr(self, stream: Stream) -> None:
        while self._process.stderr is not None and (chunk := await self._process.stderr.read(_CHUNK_BYTES)):
            with stream:
                self._stderr += chunk
                del self._stderr[:-MCP_STDERR_BYTES_KEPT]
            await stream.turn()
