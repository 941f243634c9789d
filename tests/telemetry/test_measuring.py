"""Counting: bounded, whatever strangers name; and written so that another's parser reads the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core.instruments import Instruments
from app.core.limits import METRIC_SERIES_MAX
from app.core.measuring import OTHER, Counter, Gauge, Histogram, exposition

ROOT = Path(__file__).parents[2]
HOSTILE = ['a"b', "a\\", "a\nb", 'a"} 1\nforged_total 7 #', "\\n", "ü\u2028", "", "x" * 300]


def read(*metrics: Counter | Gauge | Histogram) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As prometheus_client reads it."""
    text = exposition(metrics).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_counted_is_what_a_parser_reads() -> None:
    counter, gauge = Counter("c_total", "Counted.", ("a", "b")), Gauge("g", "Now.", ("a",))
    counter.add(("1", "2"))
    counter.add(("1", "2"), 2)
    gauge.show({("x",): 1.5, ("y",): 0})
    assert read(counter, gauge) == {
        ("c_total", (("a", "1"), ("b", "2"))): 3,
        ("g", (("a", "x"),)): 1.5,
        ("g", (("a", "y"),)): 0,
    }
    gauge.show({})
    assert ("g", (("a", "x"),)) not in read(gauge), "what is not so any more is not shown"


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram("h", "Spread.", ("p",), bounds=(1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 9):
        histogram.observe(("x",), value)
    found = read(histogram)
    counts = [found["h_bucket", (("le", bound), ("p", "x"))] for bound in ("1", "2", "4", "+Inf")]
    assert counts == [2, 3, 4, 5]
    assert found["h_sum", (("p", "x"),)] == 16
    assert found["h_count", (("p", "x"),)] == 5


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_within_its_quotes(name: str) -> None:
    counter = Counter("c_total", "Counted.", ("tool",))
    counter.add((name,))
    text = exposition([counter]).decode()
    assert text.count("\n") == 3, "a line for the help, the type and the sample"
    assert read(counter) == {("c_total", (("tool", name),)): 1}


def test_names_without_end_are_counted_as_other() -> None:
    instruments = Instruments()
    extra = 5 * METRIC_SERIES_MAX
    for number in range(METRIC_SERIES_MAX + extra):
        instruments.calls.add((f"s{number}", "t", "COMPLETED", "policy_approve"))
        instruments.phase_seconds.observe((f"s{number}", "total"), 0.1)
    assert len(instruments.calls.values) == METRIC_SERIES_MAX + 1
    assert instruments.calls.values[OTHER, OTHER, "COMPLETED", "policy_approve"] == extra
    assert len(instruments.phase_seconds.values) == METRIC_SERIES_MAX + 1
    instruments.calls.add(("s0", "t", "FAILED", "policy_approve"))
    assert instruments.calls.values["s0", "t", "FAILED", "policy_approve"] == 1, "what is known goes on by its name"
    assert len(exposition(instruments.all())) < 10 * METRIC_SERIES_MAX * 1024
    gauge = Gauge("g", "Now.", ("server",), open_labels=("server",), series_max=2)
    gauge.show({(str(number),): 1 for number in range(5)})
    assert read(gauge)["g", (("server", OTHER),)] == 3


def test_a_wrong_number_of_labels_is_a_defect() -> None:
    with pytest.raises(ValueError, match="has the labels"):
        Counter("c_total", "Counted.", ("a", "b")).add(("1",))


def test_every_metric_is_named_as_prometheus_wants_it_and_documented() -> None:
    metrics = Instruments().all()
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    documented = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for metric in metrics:
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.meaning.endswith(".")
        assert "\n" not in metric.meaning
        assert f"| `{metric.name}` |" in documented
