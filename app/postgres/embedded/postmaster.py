"""A server process seen from outside: whether it answers, whose a recorded pid is, locks, and files of dead ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from app.postgres.embedded.binaries import Account, run_as

Standing = Literal["gone", "zombie", "ours", "stranger", "unknown"]

_PARAMETERS = b"user\0postgres\0database\0postgres\0\0"
_STARTUP = struct.pack("!ii", 8 + len(_PARAMETERS), 3 << 16) + _PARAMETERS
_READY_FOR_QUERY = b"Z\0\0\0\5I"
_STARTING_OR_STOPPING = b"\0C57P03\0"
_TERMINATE = b"X\0\0\0\4"


def answers(socket_file: Path, *, deadline: float) -> bool:
    """Whether a session can be had; a server that starts, recovers or stops refuses it with 57P03."""
    reply = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, contextlib.suppress(OSError):
        client.settimeout(min(5.0, max(0.1, deadline - time.monotonic())))
        client.connect(os.fsencode(socket_file))
        client.sendall(_STARTUP)
        while chunk := client.recv(8192):
            reply += chunk
            if reply.endswith(_READY_FOR_QUERY):
                client.sendall(_TERMINATE)
                break
        return reply != b"" and _STARTING_OR_STOPPING not in reply
    return False


def clear_way(lock_files: Sequence[Path], data_dir: Path, account: Account | None) -> bool:
    """Remove lock files that keep PostgreSQL from starting though their owner is certainly gone.

    Only with server.lock in hand, so no process of a server that we started is left. PostgreSQL itself
    trusts kill(pid, 0), which succeeds for a zombie too, and for a stranger that was given the number. It
    deals with what it can see by itself, and checks for shared memory in use in any case.
    Returns False while a server that someone else started lives here.
    """
    for lock_file in lock_files:
        with contextlib.suppress(FileNotFoundError):
            pid = recorded_pid(lock_file)
            if pid is None:
                # Empty: a crash between making and writing it, unless someone does that right now.
                if time.time() - lock_file.stat().st_mtime < 2.0:
                    return False
                lock_file.unlink()
            elif (standing := standing_of(pid, data_dir, account)) == "ours":
                return False
            elif standing in ("zombie", "stranger"):
                lock_file.unlink()
    return True


def standing_of(pid: int, data_dir: Path, account: Account | None) -> Standing:
    """A server works in its data directory, and so does every child of it; no other process does."""
    process = Path("/proc") / str(pid)
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return "unknown"
        state = process.joinpath("stat").read_bytes().rpartition(b")")[2].split()[0]
        if state in (b"Z", b"X"):
            return "zombie"
        try:
            return "ours" if process.joinpath("cwd").samefile(data_dir) else "stranger"
        except PermissionError:
            # Root in a container often may not look into others' processes; each may into its own.
            shown = run_as(account, ["/bin/sh", "-c", 'cd -P "$1" && pwd -P', "sh", process / "cwd"])
            if shown.returncode != 0:
                return "unknown"
            return "ours" if os.fsdecode(shown.stdout).rstrip("\n") == str(data_dir) else "stranger"
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except PermissionError:
        return "unknown"


def recorded_pid(lock_file: Path) -> int | None:
    """None when there is no such file, or no number in it. Single-user servers write theirs negated."""
    try:
        first_line = lock_file.read_bytes().partition(b"\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return abs(int(first_line)) or None if first_line.strip().lstrip(b"-").isdigit() else None


def end_orphans(data_dir: Path, account: Account | None, *, with_signal: str) -> None:
    """Signal every process that works in the data directory, as the account that they run as.

    Only for children of a postmaster that is gone: they can do nothing useful any more, and one that computes does not
    notice. Whatever they had not committed is as after any crash. Where there is no /proc nothing is done.
    """
    script = """
        here=$(cd -P "$1" && pwd -P) || exit
        for process in /proc/[0-9]*; do
            if [ "$(cd -P "$process/cwd" 2>/dev/null && pwd -P)" = "$here" ]; then kill "-$2" "${process#/proc/}"; fi
        done
    """
    run_as(account, ["/bin/sh", "-c", script, "sh", data_dir, with_signal])


def tail_of(log_file: Path) -> str:
    """The last lines of a server's log, for an error message."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode("utf-8", "replace").splitlines()[-12:]
    except OSError as error:
        return f"Log: {log_file} (not readable: {error.strerror})"
    return "\n".join([f"Log: {log_file}, which ends:", *lines])


def try_exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
