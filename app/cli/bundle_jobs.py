"""A bundle that is accepted by shares of its streams: by one, in this process, or by several, each in its own."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from app.cli.bundle_files import DiskMemory, FolderFiles, own_schemas
from app.cli.leaf_file import LeafFile, joined_leaves, read_leaves
from app.cli.shared_memory import SharedMemory
from app.cli.verify_workers import CannotStart, Start, Workers, say_alone, usable_cores
from app.core.errors import TgaError, VerificationUnfinished
from app.core.limits import BUNDLE_SHARED_FROM_BYTES
from app.core.note import TreeHead, VerifierKey
from app.domain.ledger.checks import Kinds, Report
from app.domain.log.bundle import ENTRIES
from app.domain.log.bundle_report import BundleReport
from app.domain.log.bundle_verification import verify_bundle
from app.domain.log.heads import fits
from app.domain.log.shares import (
    FORK,
    Forked,
    Gathered,
    NotShared,
    Share,
    Shares,
    ShareWalk,
    find_forks,
    share_of,
    sources_of,
)
from app.domain.log.streams import NotRemembered, StreamMemory
from app.domain.runs.verification import stream_checks


def jobs_for(folder: Path, jobs: int | None) -> int:
    """As many as were asked for; if none were named, all cores for a bundle that is large enough to be worth it."""
    if jobs is not None:
        return jobs
    entries = folder / ENTRIES
    is_large = entries.is_file() and entries.stat().st_size >= BUNDLE_SHARED_FROM_BYTES
    return usable_cores() if is_large else 1


def accept_in_jobs(
    folder: Path,
    keys: Sequence[VerifierKey],
    held: Sequence[TreeHead],
    jobs: int,
    *,
    seen: Callable[[int], None] = lambda _: None,
    start: Start = Workers,
) -> BundleReport | None:
    """The report on a bundle in which nothing is wrong; None where one walk has to judge it, which says nothing about
    it: also where there is no room on disk for what shares keep, of which one walk needs less. VerificationUnfinished
    when a process did not end as it should. `start` starts the jobs."""
    kinds, report = stream_checks(), BundleReport()
    files = FolderFiles(folder, seen=seen)
    with ExitStack() as stack:
        try:
            entries = FolderFiles(folder)
            forks = find_forks(entries.lines(ENTRIES), kinds) if entries.has(ENTRIES, FORK) else []
            sources = sources_of(forks)
            own = stack.enter_context(DiskMemory(kinds))
            memory: StreamMemory = own
            shares: Shares
            if jobs == 1:
                shares = stack.enter_context(_Alone(forks, kinds, own))
            else:
                home = Path(stack.enter_context(_temporary_folder()))
                memory = joined = SharedMemory(kinds, own, lambda stream: share_of(stream.encode(), jobs, sources))
                shares = stack.enter_context(_Shares(folder, home, jobs, forks, kinds, joined, start))
            for _ in verify_bundle(
                files,
                keys,
                verify=fits,
                memory=memory,
                report=report,
                schemas=own_schemas(),
                kinds=kinds,
                held=held,
                shares=shares,
            ):
                return None  # only what cannot be read at all comes so far
        except CannotStart as error:
            say_alone(error)
            return None
        except VerificationUnfinished:
            raise
        except (NotShared, NotRemembered, TgaError, OSError, sqlite3.Error):
            return None
    return report if report.is_sound else None


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tga-verify-")


class _Alone(ExitStack):
    """All streams as one share, which this process judges while it reads the lines."""

    def __init__(self, forks: Sequence[Forked], kinds: Kinds, memory: DiskMemory) -> None:
        super().__init__()
        with _temporary_folder() as home:  # open files outlive it: whatever ends this process, nothing is left
            path = Path(home) / "leaves"
            self._leaves = self.enter_context(LeafFile(path))
            self._told = self.enter_context(path.open("rb"))
        self._walk = ShareWalk(Share(0, 1, forks), kinds, memory=memory, put=self._leaves.put)
        self.take = self._walk.take

    def gather(self) -> Gathered:
        report = self._walk.end()
        self._leaves.flush()
        return Gathered([report], joined_leaves([self._told]))


class _Shares(ExitStack):
    """The Shares of a folder, each in a process."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        jobs: int,
        forks: Sequence[Forked],
        kinds: Kinds,
        memory: SharedMemory,
        start: Start,
    ) -> None:
        super().__init__()
        self._kinds, self._memory = kinds, memory
        self._leaves = [home / f"leaves-{index}" for index in range(jobs)]
        self._files = [home / f"share-{index}" for index in range(jobs)]
        said = [[stream, list(origin)] for stream, origin in forks]
        self._workers = self.enter_context(
            start(
                [
                    {
                        "kind": "share",
                        "folder": str(folder),
                        "index": index,
                        "of": jobs,
                        "forks": said,
                        "memory": str(path),
                        "leaves": str(leaves),
                    }
                    for index, (path, leaves) in enumerate(zip(self._files, self._leaves, strict=True))
                ]
            )
        )

    def take(self, number: int, stream: bytes, raw: bytes) -> None:
        """The processes read the bundle themselves."""

    def gather(self) -> Gathered:
        counts = []
        for index in range(len(self._files)):
            answer = self._workers.hear(index)
            if not answer["accepted"]:
                raise NotShared("a share is not accepted")
            counts.append(answer["counts"])
        self._memory.join(
            [self.enter_context(DiskMemory(self._kinds, path=path, is_new=False)) for path in self._files]
        )
        return Gathered([Report(**one) for one in counts], read_leaves(self._leaves))
