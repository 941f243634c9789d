"""A sequencer as a process of its own that kills itself at a boundary.

    python -m tests.log.process URL KEYS [BOUNDARY]

Nothing in `app` knows of it: the tree's session and the signer are wrapped. A boundary is a moment at which a crash
leaves something else behind than a moment earlier:

    leader_term.before  leader_term.rolled_back  leader_term.done  the commit before which nothing is signed
    integrate.before    integrate.rolled_back    integrate.done    the places of new entries
    nodes.before        nodes.rolled_back        nodes.done        the hashes of whole subtrees
    memory.before       memory.unfinished        memory.done       the signer's memory; unfinished: written, not renamed
    head.before         head.rolled_back         head.done         the signed head
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from app.core.merkle import Hash, Node
from app.domain.log.heads import SignedHead
from app.keys import log_signer
from app.postgres.sequencer import Integrated, Sequencer, TreeSession

BOUNDARIES = [
    f"{step}.{moment}"
    for step, moments in {
        "leader_term": ("before", "rolled_back", "done"),
        "integrate": ("before", "rolled_back", "done"),
        "nodes": ("before", "rolled_back", "done"),
        "memory": ("before", "unfinished", "done"),
        "head": ("before", "rolled_back", "done"),
    }.items()
    for moment in moments
]
LAST = ""  # given on the command line


def cross(boundary: str) -> None:
    if boundary == LAST:
        os.kill(os.getpid(), signal.SIGKILL)


class MinedSession(TreeSession):
    async def _mined(self, step: str, work: Callable[[], Awaitable[Any]]) -> Any:
        cross(f"{step}.before")
        if f"{step}.rolled_back" == LAST:
            # Sent and executed, and gone with its transaction.
            await self._session.execute("BEGIN")
            await work()
            cross(LAST)
        result = await work()
        cross(f"{step}.done")
        return result

    async def begin_leader_term(self) -> None:
        await self._mined("leader_term", lambda: TreeSession.begin_leader_term(self))

    async def integrate(self, rows_max: int) -> Integrated:
        found: Integrated = await self._mined("integrate", lambda: TreeSession.integrate(self, rows_max))
        return found

    async def add_nodes(self, nodes: Sequence[tuple[Node, Hash]]) -> None:
        await self._mined("nodes", lambda: TreeSession.add_nodes(self, nodes))

    async def add_head(self, signed: SignedHead) -> None:
        await self._mined("head", lambda: TreeSession.add_head(self, signed))


def mined_write(file: Path, content: bytes) -> None:
    cross("memory.before")
    if LAST == "memory.unfinished":
        file.with_name(f"{file.name}.unfinished").write_bytes(content[: len(content) // 2])
        cross(LAST)
    plain_write(file, content)
    cross("memory.done")


async def work(url: str, keys: str) -> None:
    signer = log_signer.LogSigner.open(Path(keys), environment={})
    print("ready", flush=True)
    await Sequencer(lambda: MinedSession.open(url), signer).run()


if __name__ == "__main__":
    LAST = sys.argv[3] if len(sys.argv) > 3 else ""
    plain_write = vars(log_signer)["write_private"]
    vars(log_signer)["write_private"] = mined_write
    asyncio.run(work(sys.argv[1], sys.argv[2]))
