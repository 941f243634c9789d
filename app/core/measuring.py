"""Counters, gauges and histograms, and the text that Prometheus reads (exposition format 0.0.4).

Small on purpose: counting costs a look into a dict and an addition, a quarter of what the usual client takes, because
one thread counts and nothing is locked. Numbers are of this process; those of several are added up by their reader.

What strangers choose (names of servers and tools) is bounded: of labels that are `open` at most `series_max`
combinations are kept, and all others are counted under `other`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from app.core.limits import METRIC_SERIES_MAX

OTHER: Final = "other"
Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "histogram"]

# From half a millisecond to a minute: a policy's verdict, a commit, a tool that takes its time.
SECONDS: Final = (*(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),)
_SPECIAL: Final = re.compile(r'[\\"\n]')
_ESCAPED: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}


class Metric:
    """A name, what it counts, and the names of its labels. `open_labels`: those whose values strangers choose."""

    kind: Kind

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        open_labels: Sequence[str] = (),
        series_max: int = METRIC_SERIES_MAX,
    ) -> None:
        # Set here for good.
        self.name = name
        self.meaning = meaning
        self.labels = tuple(labels)
        self._open = tuple(self.labels.index(label) for label in open_labels)
        self._series_max = series_max
        self._known: set[Labels] = set()  # combinations of open labels that are kept; `_admitted` adds

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """What is appended to the name, the labels as they are written, the value."""
        raise NotImplementedError

    def _admitted(self, labels: Labels) -> Labels:
        """These labels, or with `other` where there are too many of them."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        if not self._open:
            return labels
        chosen = tuple(labels[place] for place in self._open)
        if chosen not in self._known:
            if len(self._known) >= self._series_max:
                return tuple(OTHER if place in self._open else label for place, label in enumerate(labels))
            self._known.add(chosen)
        return labels

    def _written(self, labels: Labels) -> str:
        return ",".join(f'{name}="{escaped(value)}"' for name, value in zip(self.labels, labels, strict=True))


class Counter(Metric):
    """Only grows."""

    kind: Kind = "counter"

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        open_labels: Sequence[str] = (),
        series_max: int = METRIC_SERIES_MAX,
    ) -> None:
        super().__init__(name, meaning, labels, open_labels=open_labels, series_max=series_max)
        # A counter without labels is there from the beginning: what never happened is 0, not missing.
        self.values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        try:
            self.values[labels] += amount
        except KeyError:
            labels = self._admitted(labels)
            self.values[labels] = self.values.get(labels, 0) + amount

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for labels, value in self.values.items():
            yield "", self._written(labels), value


class Gauge(Metric):
    """A value of the moment: set just before it is shown."""

    kind: Kind = "gauge"

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        open_labels: Sequence[str] = (),
        series_max: int = METRIC_SERIES_MAX,
    ) -> None:
        super().__init__(name, meaning, labels, open_labels=open_labels, series_max=series_max)
        self._values: dict[Labels, float] = {}

    def show(self, values: Mapping[Labels, float]) -> None:
        """These, and nothing that was shown before."""
        self._known.clear()
        shown: dict[Labels, float] = {}
        for labels, value in values.items():
            admitted = self._admitted(labels)
            shown[admitted] = value if admitted == labels else shown.get(admitted, 0) + value
        self._values = shown

    def set(self, value: float) -> None:
        self.show({(): value})

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for labels, value in self._values.items():
            yield "", self._written(labels), value


class ReadCounter(Gauge):
    """A counter that another component keeps, and that is read off."""

    kind: Kind = "counter"


class Histogram(Metric):
    """How values are spread: how many were at most so large, their number and their sum."""

    kind: Kind = "histogram"

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float] = SECONDS,
        open_labels: Sequence[str] = (),
        series_max: int = METRIC_SERIES_MAX,
    ) -> None:
        super().__init__(name, meaning, labels, open_labels=open_labels, series_max=series_max)
        self.bounds = tuple(bounds)
        # By labels: how many fell between a bound and the one before it, beyond the last at the end; then their sum.
        self.values: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        try:
            counts = self.values[labels]
        except KeyError:
            counts = self.row(labels)
        counts[bisect_left(self.bounds, value)] += 1
        counts[-1] += value

    def row(self, labels: Labels) -> list[float]:
        """What is counted under these labels, for callers that observe often: `row[bisect_left(bounds, value)] += 1`
        and `row[-1] += value` are what `observe` does."""
        return self.values.setdefault(self._admitted(labels), [0.0] * (len(self.bounds) + 2))

    def samples(self) -> Iterator[tuple[str, str, float]]:
        for labels, counts in self.values.items():
            written, total = self._written(labels), 0.0
            before = written + "," if written else ""
            for bound, count in zip((*self.bounds, "+Inf"), counts[:-1], strict=True):
                total += count
                yield "_bucket", f'{before}le="{bound}"', total
            yield "_sum", written, counts[-1]
            yield "_count", written, total


def escaped(value: str) -> str:
    """A label's value, on one line and within its quotes whatever it holds."""
    if not _SPECIAL.search(value):
        return value
    return _SPECIAL.sub(lambda found: _ESCAPED[found.group()], value)


def exposition(metrics: Iterable[Metric]) -> bytes:
    """All of them, as Prometheus reads it."""
    lines = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n")
        for suffix, labels, value in metric.samples():
            written = f"{{{labels}}}" if labels else ""
            lines.append(f"{metric.name}{suffix}{written} {_number(value)}\n")
    return "".join(lines).encode("utf-8", "replace")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
