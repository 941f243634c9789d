"""Random programs, random faults, against a model: in process, so that what fails is made small (machine.py).

TGA_SEED repeats what was printed; without it a seed is chosen. The 1,000 examples of soak with the seed 20261117, on
two busy cores: 46 minutes, 4,648 leases, 1,556 lost, 1,057 requests held, 656 old attempts that went on, 542 of them
recorded as fenced, 116 forks, 55 cancelled; all as the model says."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import IS_SOAK
from tests.runs.machine import MachineWorld, RunsMachine
from tests.runs.world import RunsWorld

SETTINGS = settings(
    max_examples=1_000 if IS_SOAK else 10,
    stateful_step_count=50 if IS_SOAK else 20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.fixture(scope="module")
def machine_world(world: RunsWorld) -> Iterator[MachineWorld]:
    with MachineWorld(world.database) as opened:
        yield opened


def machine_on(world: MachineWorld) -> type[RunsMachine]:
    return type("Machine", (RunsMachine,), {"world": world})


def test_random_programs_with_random_faults_end_as_the_model_says(machine_world: MachineWorld) -> None:
    chosen = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={chosen}")
    run_state_machine_as_test(seed(chosen)(machine_on(machine_world)), settings=SETTINGS)
    print(machine_world.seen)
    if IS_SOAK:
        happens = {"COMPLETED", "CANCELLED", "LOST", "FENCED", "held", "zombie", "fork"}
        assert happens <= {what for what, count in machine_world.seen.items() if count >= 10}
