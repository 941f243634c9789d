"""The names of a log that had to begin anew. Its first origin is as configured; each later one says which epoch it is.

A log is one history, and its key signs no second one under the same name. When entries that were signed are lost for
good (an old backup is all there is), the history before and the one after are two logs: `example.org/log` and
`example.org/log/epoch-2`. An entry on the system stream, which every later head covers, says so and why.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final

from app.core.errors import BundleInvalid, LogForked, TgaError
from app.core.merkle import Hash
from app.core.note import TreeHead, VerifierKey
from app.domain.ledger.checks import Epoch

_LATER: Final = re.compile(r"(?P<base>.+)/epoch-(?P<epoch>[1-9][0-9]{0,8})")


def base_of(origin: str) -> str:
    """What all epochs of a log have in common."""
    later = _LATER.fullmatch(origin)
    return later["base"] if later else origin


def epoch_of(origin: str) -> int:
    later = _LATER.fullmatch(origin)
    return int(later["epoch"]) if later else 1


def next_origin(origin: str) -> str:
    return f"{base_of(origin)}/epoch-{epoch_of(origin) + 1}"


def keys_for(origin: str, keys: Iterable[VerifierKey]) -> list[VerifierKey]:
    """The same keys, as they sign heads of this epoch of their log: a key's name is an origin, and epochs change it."""
    return [VerifierKey(origin, key.public_key) for key in keys if base_of(key.name) == base_of(origin)]


def origins_of(epochs: Sequence[Epoch]) -> list[str]:
    """Every origin that the log has had and no longer has."""
    return [epoch.former_origin for epoch in epochs]


def is_lost(head: TreeHead, epochs: Iterable[Epoch]) -> bool:
    """Whether some of the leaves under this head were lost when its epoch ended."""
    return any(epoch.former_origin == head.origin and head.size > epoch.kept_size for epoch in epochs)


def verify_epochs(origin: str, epochs: Sequence[Epoch]) -> Iterator[TgaError]:
    """A log that began anew says so in what its head covers: the last epoch that is told of is the head's own."""
    if (epochs[-1].origin != origin) if epochs else epoch_of(origin) > 1:
        yield BundleInvalid(
            "the log began anew, and its epoch is not the one that the covered entries tell of",
            expected=epochs[-1].origin if epochs else f"an entry that begins epoch {epoch_of(origin)}",
            found=origin,
        )


def verify_former(
    kept: TreeHead, epochs: Sequence[Epoch], *, root: Hash | None
) -> Generator[TgaError, None, str | None]:
    """Compare a head that was kept from an earlier epoch with what the entries say of its end, and with `root`, which
    the tree has today at that size. Returns what cannot be known, because it was lost."""
    ended = next((epoch for epoch in epochs if epoch.former_origin == kept.origin), None)
    if ended is None:
        yield LogForked(
            "a head that was kept is of another log, or of an epoch that no entry tells of", found=kept.origin
        )
        return None
    last = (ended.former_size, ended.former_root)
    is_beyond = kept.size > last[0] or (kept.size == last[0] and kept.root.hex() != last[1])
    is_other = kept.size <= ended.kept_size and root is not None and root != kept.root
    if is_beyond or is_other:
        yield LogForked(
            f"the head of {kept.size} leaves that was kept is not of the log that epoch {ended.epoch} says it follows",
            expected=f"root {kept.root.hex()} over {kept.size} leaves",
            found=f"root {root.hex()}" if root and is_other else f"a last head of {last[0]} leaves, root {last[1]}",
        )
    if is_beyond or is_other or kept.size <= ended.kept_size:
        return None
    return (
        f"What the leaves of {kept.origin} from {ended.kept_size} on were, of which a head of {kept.size} leaves was "
        f"kept: they were lost before epoch {ended.epoch} of the log, as its entry says."
    )
