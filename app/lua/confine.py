"""What a child gives up before it sees a submitted program. Standard library only: it runs in the child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    return bool(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)


def confine(*, child_bytes: int) -> list[str]:
    """Give up what can be given up here, and say what is in force, in the order in which it was done."""
    in_force: list[str] = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.close(fd)
    _bound("memory", resource.RLIMIT_AS, child_bytes, in_force)
    _bound("no-files", resource.RLIMIT_NOFILE, 3, in_force)
    _bound("no-writes", resource.RLIMIT_FSIZE, 0, in_force)
    _bound("no-core", resource.RLIMIT_CORE, 0, in_force)
    _bound("no-processes", resource.RLIMIT_NPROC, 0, in_force)
    if sys.platform == "linux":
        if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
            in_force.append("no-new-privileges")
        if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            in_force.append("dies-with-parent")
    return in_force


def _bound(name: str, kind: int, value: int, in_force: list[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))
        in_force.append(name)
