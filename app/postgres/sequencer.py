"""The sequencer: entries become leaves in the order of their commits, and the tree's heads are signed and published.

One at a time across gateways: the one whose session holds a lock. All that it writes goes through that very session, so
that a sequencer that has lost the lock can write nothing more. Others stand by, and follow the published heads.

A round is: places for new entries (committed), hashes of the subtrees that they complete (committed), the head signed
and remembered beside the key (durable), the head published (committed). A crash between any two of them is finished by
the next round, which begins by looking at what is there: there is no other way to start.

Nothing is signed that a synchronous standby may not have: each commit above waits for it, and what was already there is
covered by one that does nothing else (`begin_leader_term`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import asyncpg

from app.core.errors import ConcurrentExecution, LogForked, StoreUnavailable, TgaError
from app.core.instruments import Instruments
from app.core.limits import (
    EPOCH_WAIT_MS,
    LOG_BATCH_ROWS_MAX,
    LOG_LEAVES_AT_HAND_MAX,
    LOG_LOOK_EVERY_MS,
    LOG_RETRY_MAX_MS,
    LOG_ROUND_MS,
    LOG_STALL_MS,
    LOG_STANDBY_MS,
)
from app.core.merkle import Frontier, Hash, Node, Range
from app.core.note import TreeHead, VerifierKey
from app.domain.log.condition import LogCondition
from app.domain.log.epochs import next_origin
from app.domain.log.heads import HeadSigner, SignedHead, verify_follows
from app.postgres.horizon import Stall, load_stall
from app.postgres.sessions import GATEWAY_ROLE, LOST, Closing, connect, unavailable
from app.postgres.tree import KEPT_LEVEL, PostgresTree
from app.postgres.unlogged import UnloggedSearch

logger = logging.getLogger("tga")

# Where PostgreSQL says that it no longer waits for a standby; unlike the message, it is the same in every language.
_WAIT_BROKEN_OFF = "SyncRepWaitForLSN"
_LOCK = "SELECT pg_try_advisory_lock(tga.tree_lock_key('sequencer')) AS is_held"


@dataclass(frozen=True, slots=True)
class Integrated:
    """What one batch came to. `horizon`: the oldest transaction that still runs; what follows it has to wait."""

    tree_size: int
    has_more: bool
    horizon: str


class TreeSession(Closing):
    """A session of its own that may hold the sequencer's lock, and all that a sequencer does with it."""

    def __init__(self, session: asyncpg.Connection[asyncpg.Record]) -> None:
        self._session = session
        self._broken_off: str | None = None
        session.add_log_listener(self._hear)

    @classmethod
    async def open(cls, url: str) -> Self:
        return cls(await connect(url, role=GATEWAY_ROLE))

    def _hear(self, _: object, message: asyncpg.PostgresLogMessage) -> None:
        if message.as_dict().get("server_source_function") == _WAIT_BROKEN_OFF:
            self._broken_off = str(message)

    async def close(self) -> None:
        try:
            await self._session.close(timeout=5.0)
        except (*LOST, asyncpg.PostgresError):
            self._session.terminate()

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        self._broken_off = None
        try:
            rows = await self._session.fetch(statement, *arguments)
        except (*LOST, asyncpg.PostgresError) as error:
            raise unavailable(error) from error
        if self._broken_off is not None:  # pg_cancel_backend: the server warns, and calls it a success
            raise StoreUnavailable("a commit did not wait for its standby", found=self._broken_off)
        return rows

    async def try_lock(self) -> bool:
        """Whether this session is the sequencer's now, until it ends."""
        return bool((await self.fetch(_LOCK))[0]["is_held"])

    async def begin_leader_term(self) -> None:
        """When it returns, all that this session has seen is where synchronous replication wants it to be."""
        await self.fetch("SELECT tga.begin_leader_term()")

    async def integrate(self, rows_max: int) -> Integrated:
        (row,) = await self.fetch("SELECT * FROM tga.integrate($1)", rows_max)
        return Integrated(row["tree_size"], row["has_more"], row["horizon"])

    async def add_nodes(self, nodes: Sequence[tuple[Node, Hash]]) -> None:
        levels, indices = [node.level for node, _ in nodes], [node.index for node, _ in nodes]
        await self.fetch("SELECT tga.add_tree_nodes($1, $2, $3)", levels, indices, [found for _, found in nodes])

    async def add_head(self, signed: SignedHead) -> None:
        head = signed.head
        await self.fetch("SELECT tga.add_tree_head($1, $2, $3)", head.size, head.root, signed.note)


OpenTree: TypeAlias = Callable[[], Awaitable[TreeSession]]


class Sequencer:
    """One gateway's sequencer, working or standing by. What it could do wrong the database refuses: an entry is a leaf
    once, indices have no gaps, a size has one root; and the signer refuses the rest."""

    def __init__(
        self,
        open_tree: OpenTree,
        signer: HeadSigner,
        *,
        stall_ms: int = LOG_STALL_MS,
        look_every_ms: int = LOG_LOOK_EVERY_MS,
        instruments: Instruments | None = None,
    ) -> None:
        # Set here for good.
        self._open_tree = open_tree
        self._signer = signer
        self._stall_ms = stall_ms
        self._look_every_ms = look_every_ms
        self._instruments = instruments or Instruments()
        # While this gateway leads: set and cleared by the round's task. Held up: a commit waits for its standby.
        self._term: LeaderTerm | None = None
        self._is_held_up = False
        # Set when work fails, cleared by the next round (or follow, on standby) that succeeds. A fault is a forked
        # log: nothing is signed until it is whole again.
        self._fault: TgaError | None = None
        self._failure: TgaError | None = None
        self._failures_told: set[str] = set()
        self._retry_ms = LOG_ROUND_MS
        # The search for entries that no leaf names, by the round's task: its state, when it looks next, what it told.
        self._search = UnloggedSearch()
        self._next_look = 0.0
        self._unlogged_told: set[str] = set()

    @property
    def verifier_key(self) -> VerifierKey:
        return self._signer.verifier_key

    @property
    def fault(self) -> TgaError | None:
        """LogForked while the tree contradicts what was signed; it ends when the tree no longer does."""
        return self._fault

    @property
    def is_working(self) -> bool:
        """Whether this gateway is the one that sequences."""
        return self._term is not None

    @property
    def stall(self) -> Stall | None:
        """Who holds the log back, if entries have been waiting for it for a while."""
        return None if self._term is None else self._term.stall

    @property
    def is_stalled(self) -> bool:
        return self.stall is not None

    @property
    def condition(self) -> LogCondition:
        """How the log is kept here, in words for /readyz; where and by whom is for the gateway's own log."""
        if self._failure is not None:
            return LogCondition("failing", self._failure.what)
        if self._is_held_up:
            return LogCondition("failing", "PostgreSQL does not confirm the sequencer's first commit")
        if self.is_working and self._search.streams:
            return LogCondition(
                "unlogged", "entries stand in the ledger that no signed head will ever cover; run `tga verify --all`"
            )
        if self.is_stalled:
            return LogCondition("stalled", "a transaction that has not ended keeps entries out of the log")
        return LogCondition()

    async def run(self) -> None:
        """Stand by, take over, work, until cancelled. Whatever fails is told of once, and tried again."""
        while True:
            try:
                await self._work()
            except TgaError as error:
                self._note_failure(error)
            await asyncio.sleep(self._retry_ms / 1000)
            self._retry_ms = min(2 * self._retry_ms, LOG_RETRY_MAX_MS)

    async def _work(self) -> None:
        session = await self._open_tree()
        try:
            await self._stand_by(session)
            term = LeaderTerm(session, self._signer, stall_ms=self._stall_ms)
            with self._telling_of_waits():
                await term.settle()
            self._term = term
            is_more = await term.make_round()
            self._note_success()
            logger.info("this gateway sequences the log")
            while True:
                await self._look(session, term.tree_size)
                if not is_more:
                    await asyncio.sleep(LOG_ROUND_MS / 1000)
                is_more = await term.make_round()
        finally:
            self._term = None
            await session.close()

    async def _look(self, session: TreeSession, tree_size: int) -> None:
        """Look at a few more entries, now and then: is there one that stands before the cursor and has no leaf?"""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._look_every_ms / 1000
        await self._search.look(session, tree_size=tree_size)
        if new := [stream for stream in self._search.streams if stream not in self._unlogged_told]:
            logger.error(
                "entries stand in the ledger that the sequencer never saw, and no signed head will ever cover them; "
                "run `tga verify --all`: %s",
                ", ".join(new),
            )
            self._unlogged_told.update(new)
        elif self._unlogged_told and not self._search.streams:
            logger.warning("every entry up to the tree's cursor has a leaf again")
            self._unlogged_told.clear()

    async def _stand_by(self, session: TreeSession) -> None:
        tree = PostgresTree(session)
        while not await session.try_lock():
            if await follow(tree, self._signer):
                self._note_success()
            await asyncio.sleep(LOG_STANDBY_MS / 1000)

    @contextlib.contextmanager
    def _telling_of_waits(self) -> Iterator[None]:
        """Say why nothing is signed. Once: each try ends with the session's timeout, and another follows."""

        def tell() -> None:
            if not self._is_held_up:
                self._is_held_up = True
                logger.warning(
                    "nothing is signed: PostgreSQL does not confirm the sequencer's first commit; "
                    "with synchronous replication it waits until a standby is there"
                )

        waiting = asyncio.get_running_loop().call_later(self._stall_ms / 1000, tell)
        try:
            yield
        finally:
            waiting.cancel()
        if self._is_held_up:
            self._is_held_up = False
            logger.warning("the sequencer's first commit is confirmed; the log goes on")

    def _note_failure(self, error: TgaError) -> None:
        """Each failure is told of once, however often it is tried again, until a round has succeeded."""
        self._instruments.log_faults.add((error.code,))
        if isinstance(error, LogForked):
            if self._fault is None:
                logger.critical("the log is forked; nothing is sequenced and nothing is signed: %s", error)
            self._fault = error
        else:
            told = f"{error.code}: {error.what}"
            if told not in self._failures_told:
                self._failures_told.add(told)
                logger.error("the log waits, and this gateway signs nothing: %s", error)
        self._failure = error.with_traceback(None)  # which would keep the frames of what failed

    def _note_success(self) -> None:
        if self._fault is not None:
            logger.warning("the log is whole again")
        elif self._failure is not None:
            logger.warning("the log goes on")
        self._fault, self._failure = None, None
        self._failures_told.clear()
        self._retry_ms = LOG_ROUND_MS


async def follow(tree: PostgresTree, signer: HeadSigner) -> bool:
    """Remember the newest published head, so that this signer never contradicts another; LogForked if it does already.

    False when there is nothing to compare with: the memory may be ahead, on its way to being published.
    """
    remembered = await asyncio.to_thread(signer.load_remembered)
    latest = await tree.latest_head()
    if latest is not None and remembered is not None and signer.is_later_epoch(latest, after=remembered):
        logger.warning("the log has begun anew as %s; its first heads are followed from here on", latest.head.origin)
        await asyncio.to_thread(signer.remember, latest, [], after=remembered)
        return True
    if latest is None or (remembered is not None and latest.head.size < remembered.head.size):
        return remembered is None
    if remembered is None:
        logger.warning(
            "the log's signer remembers nothing: it goes on from the newest head in the database, whatever was signed "
            "after that; compare with a head that someone kept: tga verify --all --head FILE --key PUB"
        )
    elif latest.head == remembered.head:
        return True
    proof = [] if remembered is None else await tree.consistency_proof(remembered.head.size, latest.head.size)
    try:
        await asyncio.to_thread(signer.remember, latest, proof, after=remembered)
    except ConcurrentExecution:
        return False  # who shares the folder has signed meanwhile: it knows more than we do
    return True


class LeaderTerm:
    """The time of one session at work. Whatever fails ends it: what it knows of the tree is only true while all went
    well, and is read again by the next."""

    def __init__(self, session: TreeSession, signer: HeadSigner, *, stall_ms: int) -> None:
        self._session = session
        self._tree = PostgresTree(session)
        self._signer = signer
        self._stall_ms = stall_ms
        self._frontier = Frontier()
        self._added: list[Hash] = []  # the last leaves of the frontier, as many as came since the last head, or fewer
        self._published = 0
        self._horizon = ""
        self._horizon_since = 0.0
        self.stall: Stall | None = None

    @property
    def tree_size(self) -> int:
        return self._frontier.size

    async def settle(self) -> None:
        """Finish what a predecessor began, after seeing that the tree is the one that was signed; LogForked if not.

        Before anything is sequenced: a place that is given once stays given, also in the wrong history. Nothing that is
        found here is signed before a standby has it: after a crash also that is seen which still waited for one.
        """
        await follow(self._tree, self._signer)
        remembered, latest = await asyncio.to_thread(self._signer.load_remembered), await self._tree.latest_head()
        size = await self._tree.size()
        for known in (remembered, latest):
            if known is not None and known.head.size > size:
                raise LogForked("the tree is smaller than one that was signed", expected=known.head.size, found=size)
        self._frontier = await self._tree.load_frontier()
        await self._grow(size)
        for known in (remembered, latest):
            if known is not None:
                root = await self._tree.root(known.head.size)
                verify_follows(replace(known.head, root=root), [], after=known.head)
        await self._session.begin_leader_term()
        self._published = 0 if latest is None else latest.head.size
        if remembered is not None and remembered.head.size > self._published:
            await self._session.add_head(remembered)
            self._published = remembered.head.size

    async def begin_epoch(self, former: SignedHead, is_said: Callable[[int], Awaitable[bool]]) -> SignedHead:
        """Sequence all there is, and sign it as the first head of the log's next epoch. `is_said`: whether the entry
        that tells of it is among so many leaves. StoreUnavailable when that takes too long; it can be done again."""
        self._frontier = await self._tree.load_frontier()
        await self._grow(await self._tree.size())
        await self._session.begin_leader_term()
        deadline = time.monotonic() + EPOCH_WAIT_MS / 1000
        while True:
            step = await self._session.integrate(LOG_BATCH_ROWS_MAX)
            await self._grow(step.tree_size)
            if not step.has_more and await is_said(self._frontier.size):
                break
            if time.monotonic() > deadline:
                stall = await load_stall(self._session, step.horizon)
                raise StoreUnavailable(
                    "a transaction that does not end keeps the new epoch's entry out of the log",
                    found=stall,
                    remedy="End it, and run the command again: it goes on where it stopped.",
                )
            if not step.has_more:
                await asyncio.sleep(LOG_ROUND_MS / 1000)
        head = TreeHead(next_origin(former.head.origin), self._frontier.size, self._frontier.root())
        signed = await asyncio.to_thread(self._signer.begin_epoch, head, after=former)
        await self._session.add_head(signed)
        return signed

    async def make_round(self) -> bool:
        """One batch, and its head; whether there is more to do at once."""
        step = await self._session.integrate(LOG_BATCH_ROWS_MAX)
        await self._watch(step.horizon)
        await self._grow(step.tree_size)
        if self._frontier.size > self._published:
            await self._publish()
        return step.has_more

    async def _grow(self, size: int) -> None:
        while self._frontier.size < size:
            end = min(size, self._frontier.size + LOG_BATCH_ROWS_MAX)
            leaves = await self._tree.leaf_hashes(Range(self._frontier.size, end))
            completed = self._frontier.extend(leaves, from_level=KEPT_LEVEL)
            self._added = [*self._added, *leaves][-LOG_LEAVES_AT_HAND_MAX:]
            if completed:
                await self._session.add_nodes(completed)

    async def _publish(self) -> None:
        size, root = self._frontier.size, self._frontier.root()
        after = await asyncio.to_thread(self._signer.load_remembered)
        old = min(size, after.head.size if after is not None else 0)
        count = size - old
        added = self._added[-count:] if 0 < count <= len(self._added) else []
        proof = await self._tree.consistency_proof(old, size, added=added)
        signed = await asyncio.to_thread(self._signer.sign, size, root, proof, after=after)
        await self._session.add_head(signed)
        self._published, self._added = size, []

    async def _watch(self, horizon: str) -> None:
        now = time.monotonic()
        if horizon != self._horizon:
            if self.stall is not None:
                logger.warning("the log goes on")
            self._horizon, self._horizon_since, self.stall = horizon, now, None
        elif now - self._horizon_since > self._stall_ms / 1000:
            stall = await load_stall(self._session, horizon)
            if stall is not None and self.stall is None:
                logger.warning("entries wait to be logged: %s", stall)
            self.stall = stall
            self._horizon_since = now  # looked at again after a while, not in every round
