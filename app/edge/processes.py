"""The processes that serve one port, as one of them knows them; and their metrics, shown together.

A request to a port is answered by any of its processes. So each names itself where that matters, and `/metrics` shows
all of them, each series with the label `process`: added up they are the gateway's, and one that was started anew is a
counter that began anew, which Prometheus understands.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

METRICS: Final = "metrics"
_LABELLED: Final = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")


@dataclass(slots=True)
class Processes:
    """Alone unless `serve` says otherwise. `ready`: how many take requests, as the supervisor said last. `shows`: what
    this process shows the others when they ask, by name. `ask_others`: what the others show, by their numbers; one that
    does not answer in time is left out."""

    number: int = 1
    of: int = 1
    ready: int = 1
    shows: dict[str, Callable[[], Awaitable[bytes]]] = field(default_factory=dict)
    ask_others: Callable[[str], Awaitable[dict[int, bytes]]] | None = None

    def shown(self) -> dict[str, Any] | None:
        """For /readyz; nothing of one that is alone."""
        return None if self.of == 1 else {"answered_by": self.number, "of": self.of, "ready": self.ready}

    async def with_others(self, own: bytes) -> bytes:
        """These metrics together with those of the other processes."""
        if self.ask_others is None:
            return own
        return merged({**await self.ask_others(METRICS), self.number: own})


def merged(shown: Mapping[int, bytes]) -> bytes:
    """What several processes show, in Prometheus's text format: each metric once, every series with its process."""
    headers: dict[bytes, list[bytes]] = {}
    series: dict[bytes, list[bytes]] = {}
    for number in sorted(shown):
        name = b""
        for line in shown[number].splitlines():
            if line.startswith(b"# "):
                _, kind, name, *_ = line.split(b" ", 3)
                header = headers.setdefault(name, [])
                if not any(one.split(b" ", 2)[1] == kind for one in header):
                    header.append(line)
            else:
                series.setdefault(name, []).append(_labelled(line, number))
    lines = [line for name, header in headers.items() for line in (*header, *series.get(name, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(line: bytes, number: int) -> bytes:
    def with_label(found: re.Match[bytes]) -> bytes:
        more = b"," if found[2] else b"}"
        return b'%b{process="%d"%b' % (found[1], number, more)

    return _LABELLED.sub(with_label, line, count=1)
