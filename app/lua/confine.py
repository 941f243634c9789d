"""What a child gives up before it sees a submitted program. Standard library only: it runs in the child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile

from app.lua.seccomp import install_filter

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_FIRST_USER = 1_879_048_192  # a range that no distribution gives to users, services or containers
_NOBODY = 65_534


def confine(*, child_bytes: int) -> list[str]:
    """Give up what can be given up here, and say what is in force.

    In this order: descriptors, limits, root folder and user (root only), privileges, the parent's death, system calls.
    Each is tried by itself: what a machine does not have is missing from the answer, and the rest still holds.
    """
    in_force: list[str] = []
    _close_descriptors()
    for name, kind, value in (
        ("memory", resource.RLIMIT_AS, child_bytes),
        ("no files", resource.RLIMIT_NOFILE, 3),
        ("no writes", resource.RLIMIT_FSIZE, 0),
        ("no core", resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            if name == "no files" and os.geteuid() == 0 and _enter_empty_root():
                in_force.append("empty root")
            resource.setrlimit(kind, (value, value))
            in_force.append(name)
    if os.geteuid() == 0 and _become_stranger():
        in_force.append("own user")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        in_force.append("no processes")
    if sys.platform == "linux":
        # After the change of user, which undoes both.
        if _prctl(_PR_SET_DUMPABLE, 0):
            in_force.append("not traceable")
        if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            in_force.append("dies with parent")
        if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
            in_force.append("no new privileges")
            if install_filter():
                in_force.append("seccomp")
    return in_force


def _close_descriptors() -> None:
    """Keep 0 and 1, the frames; 2 goes to nothing."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, 65_536 if limit == resource.RLIM_INFINITY else min(limit, 65_536))


def _enter_empty_root() -> bool:
    """Make a folder that exists nowhere any more the root: empty, and nothing can be made in it."""
    try:
        place = tempfile.mkdtemp(prefix="lua-")
        os.chmod(place, 0o500)
        os.chdir(place)
        os.rmdir(place)
        os.chroot(".")
        os.chdir("/")
    except OSError:
        return False
    return True


def _become_stranger() -> bool:
    """A user and group of this process alone: no other user's files, and no other process of the same user."""
    with contextlib.suppress(OSError):
        os.setgroups([])
    for number in (_FIRST_USER + os.getpid() % 65_536, _NOBODY):
        with contextlib.suppress(OSError):
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            return True
    return False


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    return bool(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)
