"""The promises of the gateway, under load and while it dies. Ten minutes of it: `python -m bench.load`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.load.mixed import Scale, run_mixed_load


@pytest.mark.one_in(2)
def test_nothing_acknowledged_is_lost_and_nothing_is_executed_twice_however_often_the_gateway_is_killed(
    home: Path,
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    scale = Scale(seconds=55) if IS_SOAK else Scale(seconds=36, long_every_s=36, long_life_s=18)
    verdict = run_mixed_load(home, scale, seed)
    print(verdict)
    assert verdict.findings == []
