"""A process of `tga verify --jobs`: reads its job from standard input, and says what it has accepted.

A job is a share of a bundle (app/domain/log/shares.py) or pieces of a ledger. It is never given a verdict to make:
where it finds something wrong it says only that it does not accept, and the process that started it judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from app.cli.bundle_files import DiskMemory, FolderFiles
from app.cli.leaf_file import LeafFile
from app.core.errors import TgaError
from app.domain.ledger.checks import EntryPlace, ReferredBlob, Report
from app.domain.ledger.verification import Walk, verify_streams
from app.domain.log.bundle import ENTRIES
from app.domain.log.shares import Forked, NotShared, Share, walk_share
from app.domain.log.streams import NotRemembered
from app.domain.runs.verification import stream_checks


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the process that started this one ends it
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        if job["kind"] == "share":
            say(accept_share(job))
        else:
            asyncio.run(_say_pieces(job))
    except TgaError as error:
        say({"failed": f"{error.code}: {error.what}"})
    except (OSError, sqlite3.Error) as error:
        say({"failed": str(error)})


def _end_with_starter() -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    os._exit(1)


def say(document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def accept_share(job: dict[str, Any]) -> dict[str, Any]:
    """The counts of its report; what it remembers, and its leaves, are in the files that the job names."""
    kinds = stream_checks()
    forks = [Forked(stream, EntryPlace(*origin)) for stream, origin in job["forks"]]
    share = Share(job["index"], job["of"], forks)
    with (
        LeafFile(Path(job["leaves"])) as leaves,
        DiskMemory(kinds, path=Path(job["memory"])) as memory,
        DiskMemory(kinds) as aside,
    ):
        try:
            lines = FolderFiles(Path(job["folder"])).lines(ENTRIES)
            report = walk_share(lines, share, kinds, memory=memory, aside=aside, put=leaves.put)
            leaves.flush()
            memory.leave()
        except (NotShared, NotRemembered):
            return {"accepted": False}
    return {"accepted": True, "counts": report.counts()}


async def _say_pieces(job: dict[str, Any]) -> None:
    async for said in accept_pieces(job):
        say(said)


async def accept_pieces(job: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of each piece what was counted, and the blobs to which its entries refer."""
    from app.keys.keyring import Unsealer
    from app.postgres.reader import open_reader
    from app.postgres.sessions import Sessions

    kinds = stream_checks(unseals=Unsealer.find(Path(job["keys"])))
    async with (
        await Sessions.open(job["url"], sessions_max=1) as sessions,
        open_reader(sessions, snapshot=job["snapshot"]) as reader,
    ):
        async for _ in verify_streams(reader.vouching(), Walk(kinds, Report()), reader):
            pass  # said by the process that started this one
        for first, end in job["pieces"]:
            walk, blobs = Walk(kinds, Report()), list[tuple[EntryPlace, ReferredBlob]]()
            walk.on_blob = lambda place, blob, blobs=blobs: blobs.append((place, blob))
            is_accepted = True
            async with aclosing(verify_streams(reader.numbered(first, end), walk, reader)) as found:
                async for _ in found:
                    is_accepted = False
                    break
            yield {"accepted": is_accepted, "counts": walk.report.counts(), "blobs": blobs if is_accepted else []}


if __name__ == "__main__":
    main()
