"""A filter of system calls (seccomp, classic BPF) for a child: what it needs to compute, and nothing else.

Default deny: a call that is not listed answers EPERM. Another architecture's calls end the process. Reads are allowed
on descriptor 0 and writes on descriptor 1 alone; no memory becomes executable.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import Final, NamedTuple

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_CALLS: Final = 0x40000000  # the same kernel's second table on x86_64
_PROT_EXEC: Final = 4
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class Calls(NamedTuple):
    """The numbers of one architecture."""

    architecture: int
    read: int
    write: int
    mapping: tuple[int, ...]  # mmap and mprotect: never executable
    plain: dict[str, int]


_X86_64: Final = Calls(
    architecture=0xC000003E,
    read=0,
    write=1,
    mapping=(9, 10),
    plain={
        "brk": 12,
        "munmap": 11,
        "mremap": 25,
        "madvise": 28,
        "futex": 202,
        "sched_yield": 24,
        "getpid": 39,
        "rt_sigreturn": 15,
        "rt_sigprocmask": 14,
        "sigaltstack": 131,
        "restart_syscall": 219,
        "setitimer": 38,
        "select": 23,
        "pselect6": 270,
        "poll": 7,
        "ppoll": 271,
        "getrandom": 318,
        "exit": 60,
        "exit_group": 231,
        "clock_gettime": 228,
        "clock_getres": 229,
        "gettimeofday": 96,
        "time": 201,
        "getrusage": 98,
    },
)
_AARCH64: Final = Calls(
    architecture=0xC00000B7,
    read=63,
    write=64,
    mapping=(222, 226),
    plain={
        "brk": 214,
        "munmap": 215,
        "mremap": 216,
        "madvise": 233,
        "futex": 98,
        "sched_yield": 124,
        "getpid": 172,
        "rt_sigreturn": 139,
        "rt_sigprocmask": 135,
        "sigaltstack": 132,
        "restart_syscall": 128,
        "setitimer": 103,
        "pselect6": 72,
        "ppoll": 73,
        "getrandom": 278,
        "exit": 93,
        "exit_group": 94,
        "clock_gettime": 113,
        "clock_getres": 114,
        "gettimeofday": 169,
        "getrusage": 165,
    },
)
_KNOWN: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}


def build_filter(calls: Calls) -> bytes:
    """The program, one `struct sock_filter` after the other. Every jump is over the one answer that follows it."""
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, calls.architecture),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_CALLS),
        (_ANSWER, 0, 0, _KILL),
    ]
    for number, descriptor in ((calls.read, 0), (calls.write, 1)):
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS_AT),
            (_EQUAL, 0, 1, descriptor),
            (_ANSWER, 0, 0, _ALLOW),
            (_ANSWER, 0, 0, _REFUSE),
        ]
    for number in calls.mapping:
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 2 * 8),
            (_ANY_BIT, 1, 0, _PROT_EXEC),
            (_ANSWER, 0, 0, _ALLOW),
            (_ANSWER, 0, 0, _REFUSE),
        ]
    for number in calls.plain.values():
        steps += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _ALLOW)]
    steps.append((_ANSWER, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install_filter() -> bool:
    """Filter this thread's system calls from here on, for ever; False where this cannot be had.

    The process must have no new privileges already, and no other thread.
    """
    calls = _KNOWN.get(platform.machine())
    if calls is None:
        return False
    program = build_filter(calls)
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    mode, where = ctypes.c_ulong(_MODE_FILTER), ctypes.create_string_buffer(described, len(described))
    return bool(libc.prctl(_PR_SET_SECCOMP, mode, where, zero, zero) == 0)
