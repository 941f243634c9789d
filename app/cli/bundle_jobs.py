"""A bundle that several processes verify: each a share of its streams, this one the rest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from app.cli.bundle_files import DiskMemory, FolderFiles, own_schemas
from app.cli.shared_memory import SharedMemory
from app.cli.verify_workers import CannotStart, Start, Workers, say_alone, usable_cores
from app.core.errors import TgaError, VerificationUnfinished
from app.core.limits import BUNDLE_SHARED_FROM_BYTES
from app.core.merkle import HASH_BYTES, Hash
from app.core.note import TreeHead, VerifierKey
from app.domain.ledger.checks import Kinds, Report
from app.domain.log.bundle import ENTRIES
from app.domain.log.bundle_report import BundleReport
from app.domain.log.bundle_verification import verify_bundle
from app.domain.log.heads import fits
from app.domain.log.shares import Forked, Gathered, NotShared, find_forks, share_of, sources_of
from app.domain.runs.verification import stream_checks

_READ_LEAVES: Final = 2_048


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
    it. VerificationUnfinished when a process did not end as it should. `start` starts the jobs."""
    kinds, report = stream_checks(), BundleReport()
    files = FolderFiles(folder, seen=seen)
    with ExitStack() as stack:
        try:
            forks = find_forks(FolderFiles(folder).lines(ENTRIES), kinds)
            sources = sources_of(forks)
            own = stack.enter_context(DiskMemory(kinds))
            memory = SharedMemory(kinds, own, lambda stream: share_of(stream.encode(), jobs, sources))
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tga-verify-")))
            shares = stack.enter_context(_Shares(folder, home, jobs, forks, kinds, memory, start))
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
        except (NotShared, TgaError):
            return None
    return report if report.is_sound else None


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
        self._leaves = home / "leaves"
        self._leaves.touch(mode=0o600)
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
                        "leaves": str(self._leaves),
                    }
                    for index, path in enumerate(self._files)
                ]
            )
        )

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
        return Gathered([Report(**one) for one in counts], self._read_leaves())

    def _read_leaves(self) -> Iterator[Hash]:
        with self._leaves.open("rb") as file:
            while piece := file.read(HASH_BYTES * _READ_LEAVES):
                for at in range(0, len(piece), HASH_BYTES):
                    yield Hash(piece[at : at + HASH_BYTES])
