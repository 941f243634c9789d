"""Runs a command so that nothing of it outlives the gateway, however that ends. A program of its own: standard library
only.

    child_guard.py LIFELINE_FD COMMAND...

Two processes, each of which ends everything when the other is killed: the outer one, which the gateway started, forks
the inner one, which starts the command in a process group of its own, on this process's stdin, stdout and stderr. Both
are subreapers (Linux, prctl(2)): a descendant whose parent has ended becomes a child of the nearest of them and not of
init, whatever sessions and groups it made for itself, so that all of them can be found and killed.

When the other end of the lifeline is closed, by the gateway or by its death, the command's group is asked to end, and a
little later all descendants are killed. When the command has ended, what it left behind is killed, and the guards end
with its code.

Not ended: what runs as another user (setuid), and what the command had another service start for it (a
container, a unit of systemd). Where there are no subreapers, only the command's process group is ended
(`ends_all_descendants`); and if both guards are killed at once, only the command itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 2.0
_OUTER_GRACE_S = GRACE_S + 1.0  # for the inner guard to have done it all
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How often it is looked whether all are gone, and for how long if nothing changes: what cannot be killed, because it is
# another user's or sits in the kernel, is then left to the signal that it was sent.
_LOOK_FIRST_S = 0.0005
_LOOK_MAX_S = 0.5
_NO_CHANGE_MAX_S = 10.0


def ends_all_descendants() -> bool:
    """Whether this system has subreapers, so that also what left the command's process group is ended."""
    import ctypes

    return _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()))


def main(lifeline: int, command: list[str]) -> int:
    os.set_inheritable(lifeline, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    outer_lives, held_by_outer = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(held_by_outer)
        os._exit(_guard(command, {lifeline: GRACE_S, outer_lives: 0.0}))
    os.close(outer_lives)
    _leave_streams()
    return _wait(inner, {lifeline: _OUTER_GRACE_S}, ask=lambda: os.kill(inner, signal.SIGTERM))


def _guard(command: list[str], lifelines: dict[int, float]) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, guard)
    with contextlib.suppress(OSError):  # it may have done so itself, and be gone
        os.setpgid(child, child)
    _leave_streams()

    def ask() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGTERM)

    return _wait(child, lifelines, ask=ask)


def _become(command: list[str], guard: int) -> None:
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # If the guard itself is killed, the kernel kills the command. On Linux; elsewhere its closed stdin must do.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(127)
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _leave_streams() -> None:
    """Else the pipes would stay open when the command closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _wait(child: int, lifelines: dict[int, float], *, ask: Callable[[], None]) -> int:
    """The child's code, when it and all that descended from this process are gone. When one of the lifelines is closed,
    or this process is told to end, it is asked to end, and has so many seconds for it."""
    wake = _wake_on_signals()
    code: int | None = None
    deadline: float | None = None
    while (code := _reap(child)) is None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        readable, _, _ = select.select([wake, *([] if deadline else lifelines)], [], [], left_s)
        graces_s = [grace_s for end, grace_s in lifelines.items() if end in readable and not os.read(end, 4096)]
        if wake in readable and not set(os.read(wake, 4096)).isdisjoint(_ENDING):
            graces_s.append(max(lifelines.values()))
        if deadline is None and graces_s:
            ask()
            deadline = time.monotonic() + min(graces_s)
    killed = _end_descendants(child)
    code = killed if code is None else code
    return code if code >= 0 else 128 - code


def _wake_on_signals() -> int:
    """What can be read when a child has ended or this process is told to end: the numbers of the signals."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGCHLD, *_ENDING):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def _reap(child: int) -> int | None:
    """The child's code once it has ended. Orphans that were given to this process are let go as they end."""
    code: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end_descendants(child: int) -> int:
    """Kill all that there are until there are none, also if they fork all the time: a killed process forks no more,
    and its children are children of this process then. The code of `child`, if it ends here."""
    code, look_s, changed_at = 0, _LOOK_FIRST_S, time.monotonic()
    seen: set[int] = set()
    while time.monotonic() - changed_at < _NO_CHANGE_MAX_S:
        found = set(_descendants(os.getpid())) if os.path.exists("/proc/self/task") else _kill_group(child)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        has_changed = not found <= seen
        seen = found
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                has_changed = True
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            break  # no child is left, and so no descendant
        if has_changed:
            look_s, changed_at = _LOOK_FIRST_S, time.monotonic()
        time.sleep(look_s)
        look_s = min(look_s * 2, _LOOK_MAX_S)
    return code


def _kill_group(group: int) -> set[int]:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    return set()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    left = [pid]
    children_of = _children_by_tasks if Path(f"/proc/{pid}/task/{pid}/children").exists() else _children_by_parents()
    while left:
        children = children_of(left.pop())
        found += children
        left += children
    return found


def _children_by_tasks(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    return children


def _children_by_parents() -> Callable[[int], list[int]]:
    """From what all processes say of their parents: some kernels keep no lists of children (CONFIG_PROC_CHILDREN)."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(pid))
    return lambda parent: children.get(parent, [])


def _prctl(option: int, argument: object) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        return bool(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
