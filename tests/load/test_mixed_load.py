"""The promises of the gateway, under load and while it dies. Ten minutes of it: `python -m bench.load`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.load.mixed import Scale, run_mixed_load


def test_nothing_acknowledged_is_lost_and_nothing_is_executed_twice_however_often_the_gateway_is_killed(
    home: Path,
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    verdict = run_mixed_load(home, Scale(seconds=55), seed)
    print(verdict)
    assert verdict.findings == []
