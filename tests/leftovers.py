"""End what a run of the tests leaves behind: `python -m tests.leftovers FOLDER` waits until its standard input closes.

A pytest that a signal ends (`timeout`, a closed terminal, `kill -9`) tears nothing down: PostgreSQL, which is nobody's
child, and gateways would live on. The tests keep all their files in one folder, which is TMPDIR to the processes that
they start. A process is theirs if it works in that folder, as PostgreSQL does in its data directory, or has it as its
TMPDIR.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ROUNDS_MAX = 50
_PAUSE_S = 0.05


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """A process that outlives this one, however this one ends, and sweeps after it."""
    command = [sys.executable, "-m", "tests.leftovers", str(folder)]
    # In a session of its own: a signal to pytest's whole process group must not reach it.
    root = Path(__file__).parents[1]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=root)


def processes_of(folder: Path) -> Iterator[int]:
    """Who works in the folder or calls it TMPDIR; none where the system has no /proc."""
    mark = b"TMPDIR=" + os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            where = Path(os.readlink(entry / "cwd"))
            is_theirs = folder in (where, *where.parents) or mark in (entry / "environ").read_bytes().split(b"\0")
            if is_theirs and pid != os.getpid():
                yield pid


def sweep(folder: Path) -> None:
    """End them, then remove the folder. A gateway starts its PostgreSQL again, so look until there is nobody left."""
    for _ in range(_ROUNDS_MAX):
        found = list(processes_of(folder))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until whoever started this closes it or is gone
    sweep(Path(sys.argv[1]))
