"""What is in deploy/ names metrics, labels and pages that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.core.errors import ALL_ERRORS
from app.core.instruments import Instruments
from app.core.measuring import Counter, Gauge, Histogram, Metric, exposition

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_NAME = re.compile(r"\b(?:tga|process|python)_[a-z_]+")
_SELECTOR = re.compile(r"\b((?:tga|process|python)_[a-z_]+)\{([^}]*)\}")
_BY = re.compile(r"\bby \(([^)]*)\)")
_OF_TARGETS = {"job", "instance", "le"}


def metric_of(name: str) -> Metric | None:
    metrics = {metric.name: metric for metric in Instruments().all()}
    found = metrics.get(name)
    if found is None and (whole := re.fullmatch(r"(.+)_(?:bucket|sum|count)", name)):
        found = metrics.get(whole[1])
        return found if found is not None and found.kind == "histogram" else None
    return None if found is not None and found.kind == "histogram" else found


def misfits(expression: str) -> list[str]:
    """What of this expression is not there."""
    wrong = [name for name in _NAME.findall(expression) if metric_of(name) is None]
    labels = {label for name in _NAME.findall(expression) if (m := metric_of(name)) for label in m.labels} | _OF_TARGETS
    for name, selected in _SELECTOR.findall(expression):
        metric = metric_of(name)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected):
            if metric is None or label not in {*metric.labels, *_OF_TARGETS}:
                wrong.append(f"{name}{{{label}}}")
    for grouped in _BY.findall(expression):
        wrong += [f"by {label}" for label in re.split(r",\s*", grouped) if label not in labels]
    return wrong


def rules() -> list[dict[str, Any]]:
    told = yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))
    return [rule for group in told["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))["panels"])


def test_the_check_finds_what_is_not_there() -> None:
    assert misfits("rate(tga_calls_total[5m])") == []
    assert misfits("rate(tga_call_total[5m])") == ["tga_call_total"]
    assert misfits("tga_call_phase_seconds") == ["tga_call_phase_seconds"], "a histogram has only its parts"
    assert misfits('tga_runs{sate="PARKED"}') == ["tga_runs{sate}"]
    assert misfits("sum by (tool) (tga_calls_repeated_total)") == ["by tool"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_a_rule_asks_for_what_is_there_and_names_its_page(rule: dict[str, Any]) -> None:
    assert misfits(rule["expr"]) == []
    codes = set(re.findall(r"\b(?:STATE|BLOB)_[A-Z_]+", rule["expr"]))
    assert codes <= {error.code for error in ALL_ERRORS}
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "operations.md").read_text("utf-8"), re.MULTILINE)
    page, _, named = rule["annotations"]["runbook"].partition(": ")
    assert page == "operations.md"
    assert set(named.split("; ")) <= set(headings)
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_rules_cover_what_must_wake_somebody() -> None:
    asked = " ".join(rule["expr"] for rule in rules())
    for name in (
        *("tga_approvals_oldest_seconds", "tga_held_calls", "tga_log_delay_seconds", "tga_log_faults_total"),
        *('state="PARKED"', 'state="DIVERGED"', "tga_runs_without_worker", "STATE_CHECKSUM_MISMATCH"),
    ):
        assert name in asked


def test_every_graph_shows_what_is_there() -> None:
    expressions = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    assert len(expressions) > 30
    assert {expression: wrong for expression in expressions if (wrong := misfits(expression))} == {}
    shown = {
        metric.name for expression in expressions for name in _NAME.findall(expression) if (metric := metric_of(name))
    }
    unshown = {metric.name for metric in Instruments().all()} - shown
    assert unshown <= {
        *(
            "tga_build_info",
            "process_open_fds",
            "process_max_fds",
            "process_start_time_seconds",
            "tga_event_loop_tasks",
        ),
        *("python_gc_collections_total", "tga_commit_queue_bytes", "tga_log_leading"),
    }
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def _promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (apt-get install prometheus): Prometheus itself has not seen deploy/")
    return found


def test_promtool_takes_what_is_shown_of_every_metric() -> None:
    instruments = Instruments()
    for metric in instruments.all():
        hostile = tuple('a"b\\c\nd' for _ in metric.labels)
        if isinstance(metric, Counter):
            metric.add(hostile, 1.5)
        elif isinstance(metric, Histogram):
            metric.observe(hostile, 0.3)
        elif isinstance(metric, Gauge):
            metric.show({hostile: -1})
    shown = exposition(instruments.all())
    done = subprocess.run([_promtool(), "check", "metrics"], input=shown, capture_output=True)
    # It also advises on names; what it cannot read it says otherwise, with another status.
    assert b"error while linting" not in done.stderr, done.stderr
    assert done.returncode in (0, 3), done.stderr


def test_promtool_takes_the_configuration() -> None:
    command = [_promtool(), "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_promtool_takes_the_rules() -> None:
    promtool = _promtool()
    done = subprocess.run([promtool, "check", "rules", str(DEPLOY / "alerts.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
