"""What native code inside a child could try, had it broken out of Lua: a process that confines itself as a child does,
then makes the system calls, and writes what each answered. Not collected; `test_confinement.py` runs it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable

from app.lua.confine import confine

_LIBC = ctypes.CDLL(None, use_errno=True)
_X86_64 = """
execveat=322 clone=56 clone3=435 vfork=58 ptrace=101 process_vm_readv=310 process_vm_writev=311 openat2=437
memfd_create=319 io_uring_setup=425 bpf=321 userfaultfd=323 perf_event_open=298 mount=165 unshare=272
setns=308 keyctl=250 add_key=248 kexec_load=246 init_module=175 finit_module=313 sendmsg=46 recvmsg=47
pidfd_open=434 pidfd_getfd=438 tkill=200 tgkill=234 rt_sigqueueinfo=129 shmget=29 msgget=68 semget=64
mq_open=240 inotify_init1=294 eventfd2=290 signalfd4=289 pipe2=293 dup=32 dup2=33 fcntl=72 ioctl=16
sendfile=40 splice=275 symlink=88 chmod=90 mknod=133 prlimit64=302 setuid=105 setresuid=117 capset=126
prctl=157 arch_prctl=158 seccomp=317 chroot=161 pivot_root=155 reboot=169 sethostname=170 settimeofday=164
quotactl=179 swapon=167 personality=135 ioperm=173 iopl=172
"""


def _calls(parent: int) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {
        "open a file": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "open a file of its own": lambda: os.open("/proc/self/mem", os.O_RDWR),
        "write a file": lambda: os.open("/lua-was-here", os.O_CREAT | os.O_WRONLY),
        "list a folder": lambda: os.listdir("/"),
        "stat": lambda: os.stat("/"),
        "make a folder": lambda: os.mkdir("/x"),
        "a socket": lambda: socket.socket(socket.AF_INET),
        "a unix socket": lambda: socket.socket(socket.AF_UNIX),
        "a netlink socket": lambda: socket.socket(socket.AF_NETLINK),
        "a socket pair": socket.socketpair,
        "fork": os.fork,
        "a thread": lambda: threading.Thread(target=lambda: None).start(),
        "execve": lambda: os.execve("/bin/true", ["true"], {}),  # noqa: S606
        "kill the parent": lambda: os.kill(parent, signal.SIGKILL),
        "signal 0 to the parent": lambda: os.kill(parent, 0),
        "kill every process": lambda: os.kill(-1, signal.SIGTERM),
        "kill its group": lambda: os.killpg(0, signal.SIGTERM),
        "a handler of SIGPROF": lambda: signal.signal(signal.SIGPROF, signal.SIG_IGN),
        "become root": lambda: os.setuid(0),
        "leave the root folder": lambda: os.chroot("/"),
        "change the folder": lambda: os.chdir(".."),
        "more descriptors": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        "a pipe": os.pipe,
        "a duplicate": lambda: os.dup(0),
        "write to standard error": lambda: os.write(2, b"x"),
        "write to descriptor 0": lambda: os.write(0, b"x"),
        "read from descriptor 1": lambda: os.read(1, 1),
        "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "memory made executable": lambda: _checked(_LIBC.mprotect(_page(), 4096, 7)),
        "uname": os.uname,
        "setsid": os.setsid,
        "nice": lambda: os.nice(-5),
    }
    if os.uname().machine == "x86_64":
        for name, _, number in (each.partition("=") for each in _X86_64.split()):
            calls[f"the call {name}"] = lambda number=int(number): _checked(_LIBC.syscall(number, 0, 0, 0, 0, 0, 0))  # type: ignore[misc]
    return calls


def _checked(answer: int) -> int:
    if answer == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return answer


_HELD = mmap.mmap(-1, 8192)


def _page() -> ctypes.c_void_p:
    address = ctypes.addressof(ctypes.c_char.from_buffer(_HELD))
    return ctypes.c_void_p((address + 4095) & ~4095)


def main() -> None:
    if sys.argv[1] == "another user" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65_533, 65_533, 65_533)
        os.setresuid(65_533, 65_533, 65_533)
    parent = os.getppid()
    calls = _calls(parent)
    in_force = confine(child_bytes=1 << 30)
    told: dict[str, str] = {}
    for name, call in calls.items():
        try:
            found = call()
        except OSError as error:
            told[name] = errno.errorcode.get(error.errno or 0, str(error))
        except (RuntimeError, ValueError) as error:  # how Python words it for threads and limits
            told[name] = "EPERM" if "start new thread" in str(error) or "not allowed" in str(error) else str(error)
        else:
            told[name] = f"it got {found!r}"
    text = json.dumps({"confinement": in_force, "calls": told}).encode()
    while text:
        text = text[os.write(1, text) :]
    os._exit(0)


if __name__ == "__main__":
    main()
