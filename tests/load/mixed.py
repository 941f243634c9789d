"""Mixed load from 64 clients on one gateway that is killed every few seconds; and the judgement on it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

from tests.load.clients import Plan
from tests.load.judging import Verdict, judge
from tests.load.world import World

CLIENTS: Final = 64
PROCESSES: Final = 2
SUPERVISORS: Final = 4
AUDITORS: Final = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How long, and how long one gateway lives: mostly `life_s`, and `long_life_s` at the end of every
    `long_every_s`, for its memory to be looked at. Without `long_life_s` nothing is said of memory."""

    seconds: float
    life_s: tuple[float, float] = (1.0, 3.5)
    long_every_s: float = 60.0
    long_life_s: float | None = 22.0
    drain_s: float = 30.0


def run_mixed_load(home: Path, scale: Scale, seed: int) -> Verdict:
    """`home` must be a folder that PostgreSQL's account can reach."""
    world = World(home)
    try:
        world.open()
        plans = _plans(world, scale, seed)
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.load.clients", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for path, _ in plans
        ]
        try:
            _kill_again_and_again(world, scale, random.Random(seed), plans[0][1].stop_s)
            _drain(world, processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        _await_rest(world, scale.drain_s)
        world.end(signal.SIGTERM)
        feeds = {name: seen for _, plan in plans for name, seen in json.loads(Path(plan.feeds).read_text()).items()}
        notebooks = [Path(plan.notebook) for _, plan in plans]
        verdict = judge(world, notebooks, feeds, with_memory=scale.long_life_s is not None)
        verdict.summary = {"seed": seed, "seconds": scale.seconds, "clients": CLIENTS, **verdict.summary}
        return verdict
    finally:
        world.close()


def _plans(world: World, scale: Scale, seed: int) -> list[tuple[Path, Plan]]:
    roles = ["supervisor"] * SUPERVISORS + ["auditor"] * AUDITORS
    roles += ["agent"] * (CLIENTS - len(roles))
    clients = world.make_keys([(f"{role}-{number}", role) for number, role in enumerate(roles)])
    shares: list[list[tuple[str, str, str]]] = [[] for _ in range(PROCESSES)]
    for share, client in zip(cycle(shares), clients, strict=False):
        share.append(client)
    stop_s = time.monotonic() + scale.seconds
    plans = []
    for number, share in enumerate(shares):
        plan = Plan(
            url=world.url,
            seed=seed,
            stop_s=stop_s,
            until_s=stop_s + scale.drain_s,
            clients=share,
            notebook=str(world.home / f"seen-{number}.jsonl"),
            feeds=str(world.home / f"feeds-{number}.json"),
        )
        path = world.home / f"plan-{number}.json"
        plan.write(path)
        plans.append((path, plan))
    return plans


def _kill_again_and_again(world: World, scale: Scale, rng: random.Random, stop_s: float) -> None:
    """SIGKILL, and now and then an orderly end, which must not lose anything either."""
    began_s = time.monotonic()
    long_life_s = scale.long_life_s or 0.0
    long_at_s = began_s + min(scale.long_every_s, scale.seconds) - long_life_s
    ends = cycle([*[signal.SIGKILL] * 4, signal.SIGTERM])
    while (now := time.monotonic()) < stop_s:
        if long_life_s and now + scale.life_s[1] >= long_at_s:
            life_s = long_life_s
            long_at_s += scale.long_every_s
        else:
            life_s = rng.uniform(*scale.life_s)
        world.live(min(life_s, stop_s - now))
        if time.monotonic() < stop_s:
            world.end(next(ends))
            world.start()


def _drain(world: World, processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != "agents done\n":
            raise RuntimeError("a process of clients failed")
    _await_rest(world, 20)
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    for process in processes:
        if process.wait(timeout=60) != 0:
            raise RuntimeError("a process of clients failed")


def _await_rest(world: World, patience_s: float) -> None:
    """Until nothing is under way and nothing waits; the judge says what is left if that does not come."""
    deadline = time.monotonic() + patience_s
    query = "SELECT count(*) FROM tga.heads WHERE stream LIKE 'trace:%' AND is_open"
    while world.database.fetch(query)[0][0] and time.monotonic() < deadline:
        time.sleep(0.2)
