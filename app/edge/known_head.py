"""The head of a connection's last request, for the next one that has the same head: its bytes are not parsed again.

What the parser makes of a head is a function of its bytes. Most clients send the same ones again and again on a
connection, but for the number of bytes of the body: so a head is compared in two pieces, with digits between them. A
head that is kept was read by the parser and by all checks behind it; whatever differs from it goes that way too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from app.core.limits import KNOWN_HEAD_BYTES_MAX, KNOWN_REQUEST_BYTES_MAX

_CONTENT_LENGTH: Final = b"content-length"
_LENGTH_LINE: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,7})\r\n", re.IGNORECASE)
# What makes a message more than a head and so many bytes, or ends its connection. Such heads are not kept.
_UNUSUAL: Final = frozenset({b"connection", b"expect", b"transfer-encoding", b"upgrade"})


class KnownHead(NamedTuple):
    """A head in two pieces, and the scope that was made of it; the scope's Content-Length stands at `length_at`."""

    before: bytes
    after: bytes
    scope: Mapping[str, Any]
    length_at: int

    @classmethod
    def of(cls, data: bytes, body: bytes | bytearray, scope: Mapping[str, Any]) -> Self | None:
        """Of a request that came in `data` and nothing else; None if it is not one that can be known again."""
        head_bytes = len(data) - len(body)
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if head_bytes > KNOWN_HEAD_BYTES_MAX:
            return None
        if any(name in _UNUSUAL for name, _ in headers):
            return None
        places = [place for place, (name, _) in enumerate(headers) if name == _CONTENT_LENGTH]
        head = data[:head_bytes]
        lines = list(_LENGTH_LINE.finditer(head))
        # Told apart from what a parser might read in another way: one such line, one such header, and the body is the
        # rest of the bytes.
        if len(places) != 1 or [line[1] for line in lines] != [headers[places[0]][1]]:
            return None
        if not head.endswith(b"\r\n\r\n") or head.find(b"\r\n\r\n") != head_bytes - 4 or data[head_bytes:] != body:
            return None
        kept = {**scope, "headers": list(headers), "state": dict(scope["state"])}
        return cls(head[: lines[0].start(1)], head[lines[0].end(1) :], kept, places[0])

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if these bytes are this head, with any Content-Length, and exactly that many more."""
        if len(data) > KNOWN_REQUEST_BYTES_MAX or not data.startswith(self.before):
            return None
        digits_from = len(self.before)
        digits_end = data.find(b"\r", digits_from, digits_from + 8)
        if digits_end < 0 or not data.startswith(self.after, digits_end):
            return None
        digits = data[digits_from:digits_end]
        body_from = digits_end + len(self.after)
        # `isdigit` of bytes knows ASCII digits alone.
        if not digits.isdigit() or int(digits) != len(data) - body_from:
            return None
        return data[body_from:]

    def scope_for(self, body: bytes, data: bytes) -> dict[str, Any]:
        """A scope of its own for the request that came in `data`, which has this body."""
        scope = dict(self.scope)
        headers = self.scope["headers"].copy()
        digits_from = len(self.before)
        headers[self.length_at] = (_CONTENT_LENGTH, data[digits_from : len(data) - len(body) - len(self.after)])
        scope["headers"] = headers
        scope["state"] = self.scope["state"].copy()
        return scope
