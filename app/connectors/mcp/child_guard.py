"""Runs a command so that it cannot outlive the gateway, however that ends. A program of its own: standard library only.

    child_guard.py LIFELINE_FD COMMAND...

The command runs in a process group of its own, on this process's stdin, stdout and stderr. When the other end of the
lifeline is closed, by the gateway or by its death, the whole group is ended: first asked, then killed. When the command
has ended, what it left behind in its group is killed, and this process ends with the same code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(lifeline: int, command: list[str]) -> int:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, guard)
    with contextlib.suppress(OSError):  # it may have done so itself, and be gone
        os.setpgid(child, child)
    # Else the pipes would stay open when the command closes them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    code = _wait(child, lifeline, wake_read)
    _signal(child, signal.SIGKILL)
    return code


def _become(command: list[str], guard: int) -> None:
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _die_with(guard)
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _die_with(guard: int) -> None:
    """If the guard itself is killed, the kernel kills the command. On Linux; elsewhere its closed stdin must do."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(127)


def _wait(child: int, lifeline: int, wake_read: int) -> int:
    deadline: float | None = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            _signal(child, signal.SIGKILL)
            left_s = None
        readable, _, _ = select.select([wake_read, *([lifeline] if deadline is None else [])], [], [], left_s)
        if wake_read in readable:
            os.read(wake_read, 4096)
        if lifeline in readable and not os.read(lifeline, 4096):
            _signal(child, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
