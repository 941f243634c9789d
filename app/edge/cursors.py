"""Opaque cursors: where a list or the feed goes on. A client can do nothing with one but send it back.

Each kind of list has its own, so that none is taken for another's. Not signed: a made-up one only starts a page
elsewhere in what its sender may see anyway.
"""

from __future__ import annotations

import binascii
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, Literal

from app.core.errors import InputMalformed
from app.core.limits import CURSOR_CHARS_MAX, TRANSACTION_ENTRIES_MAX
from app.domain.ledger.queries import FeedPosition

ListKind = Literal["traces", "approvals", "procedures", "schedules", "runs", "keys", "policy sets", "heads", "acts"]

_LIST: Final[dict[ListKind, re.Pattern[str]]] = {
    "traces": re.compile(r"t([0-9a-f-]{1,36})"),
    # By when it expires, stream and address.
    "approvals": re.compile(r"a((?:never|[0-9]{1,18})\.[0-9]{1,18}\.[0-9.:]{0,96})"),
    "heads": re.compile(r"h([1-9][0-9]{0,17})"),
    "policy sets": re.compile(r"p([1-9][0-9]{0,17})"),
    "keys": re.compile(r"k([0-9]{1,16}\.[0-9a-f]{16})"),
    "acts": re.compile(r"a(0|[1-9][0-9]{0,17})"),
    "schedules": re.compile(r"s([A-Za-z0-9][A-Za-z0-9._-]{0,62})"),
    "runs": re.compile(r"r([0-9]{1,16}\.[1-9][0-9]{0,17})"),
    "procedures": re.compile(r"p([A-Za-z0-9][A-Za-z0-9._-]{0,62}:[1-9][0-9]{0,15})"),
}
_FEED: Final = re.compile(r"f(0|[1-9][0-9]{0,19})\.(0|[1-9][0-9]{0,4})")
_XID_MAX: Final = 2**64 - 1


def list_cursor(kind: ListKind, position: str | None) -> str | None:
    return None if position is None else _written(kind[0] + position)


def list_position(kind: ListKind, cursor: str | None) -> str | None:
    """The position in a cursor of this kind; InputMalformed for anything else."""
    return None if cursor is None else _read(_LIST[kind], cursor)[1]


def feed_cursor(position: FeedPosition) -> str:
    return _written(f"f{position.xid}.{position.taken}")


def feed_position(cursor: str | None) -> FeedPosition:
    """The position in a cursor of the feed, the beginning when there is none; InputMalformed for anything else."""
    if cursor is None:
        return FeedPosition()
    read = _read(_FEED, cursor)
    position = FeedPosition(int(read[1]), int(read[2]))
    if position.xid > _XID_MAX or position.taken > TRANSACTION_ENTRIES_MAX:
        raise _no_cursor()
    return position


def _written(text: str) -> str:
    return urlsafe_b64encode(text.encode("ascii")).rstrip(b"=").decode("ascii")


def _read(pattern: re.Pattern[str], cursor: str) -> re.Match[str]:
    if len(cursor) > CURSOR_CHARS_MAX or not cursor.isascii():
        raise _no_cursor()
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        raise _no_cursor() from None
    read = pattern.fullmatch(text)
    if read is None or _written(text) != cursor:  # one cursor has one spelling
        raise _no_cursor()
    return read


def _no_cursor() -> InputMalformed:
    # Do not echo what was sent: it means nothing to a reader.
    return InputMalformed(
        "that is no cursor of this list",
        expected="the `next` of an earlier answer, as it was",
        remedy="Send back `next` unchanged, or start again without a cursor.",
    )
