"""Testing procedures: a gateway in memory, time that can be moved, and crashes at every boundary."""

from __future__ import annotations

from tga_sdk.testing.clock import Clock
from tga_sdk.testing.crashes import Boundary, Crashes, CrashFound, Outcome, crash_everywhere, crash_everywhere_async
from tga_sdk.testing.gateway import MemoryGateway
from tga_sdk.testing.people import Ask, ScriptedPeople
from tga_sdk.testing.replays import (
    NotTheSame,
    record_golden,
    record_golden_async,
    replay_golden,
    replay_golden_async,
    run_twice,
    run_twice_async,
)
from tga_sdk.testing.tools import Call, Effect, Tool, ToolFailed, current_call, denied, needs_approval

__all__ = [
    "Ask",
    "Boundary",
    "Call",
    "Clock",
    "CrashFound",
    "Crashes",
    "Effect",
    "MemoryGateway",
    "NotTheSame",
    "Outcome",
    "ScriptedPeople",
    "Tool",
    "ToolFailed",
    "crash_everywhere",
    "crash_everywhere_async",
    "current_call",
    "denied",
    "needs_approval",
    "record_golden",
    "record_golden_async",
    "replay_golden",
    "replay_golden_async",
    "run_twice",
    "run_twice_async",
]
