"""Processes that verify shares of a bundle or pieces of a ledger: start them, hear them, end them.

Each is a new Python with this package's own worker (app/cli/verify_worker.py), not a fork: it shares nothing but what
its job says, one line of JSON on its standard input. It answers with lines of JSON and ends. A process that ends
before it has said all gives VerificationUnfinished, never a verdict. When this process ends, however that happens, the
input of its workers ends, and so do they.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, TypeAlias

from app.cli.running import errors
from app.core.errors import VerificationUnfinished

WORKER: Final = (sys.executable, "-m", "app.cli.verify_worker")
_CGROUP_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_END_S: Final = 10.0


class CannotStart(Exception):
    """The system lets no process be started here: one does all of it."""


class Heard(AbstractContextManager[Any], Protocol):
    """Jobs that were started. Leaving it ends them."""

    def hear(self, index: int) -> Any:
        """The next that a job says."""
        ...


Start: TypeAlias = Callable[[Sequence[dict[str, Any]]], Heard]


class Workers(AbstractContextManager["Workers"]):
    """One process for each job. `with` ends those that have not ended."""

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                self._processes.append(subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                with suppress(BrokenPipeError):  # said when its answer is missing
                    _of(self._processes[-1].stdin).write(json.dumps(job).encode() + b"\n")
                    _of(self._processes[-1].stdin).flush()
        except OSError as error:
            self.close()
            raise CannotStart(error.strerror or str(error)) from None
        except BaseException:
            self.close()
            raise

    def hear(self, index: int) -> Any:
        """The next line of a worker. VerificationUnfinished if there is none, or the worker says that it failed."""
        process = self._processes[index]
        line = _of(process.stdout).readline()
        if line.endswith(b"\n"):
            said = json.loads(line)
            if isinstance(said, dict) and "failed" in said:
                raise VerificationUnfinished("a process of the verification failed", found=said["failed"])
            return said
        raise VerificationUnfinished("a process of the verification ended early", found=_ending(process))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(_END_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not written to a killed process
                        pipe.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def say_alone(error: CannotStart) -> None:
    errors.print(f"No process can be started here ({error}): one verifies all of it.", markup=False)


def _of(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise VerificationUnfinished("a process of the verification has no pipe")
    return pipe


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} closed its output"
    if code < 0:
        return f"process {process.pid} was ended by {signal.Signals(-code).name}"
    return f"process {process.pid} ended with {code}"


def usable_cores() -> int:
    """Those that this process may use: its affinity, and what its control group allows."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores
