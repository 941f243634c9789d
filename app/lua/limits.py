"""Every bound on a submitted program, its unit in its name. The child enforces them; the parent holds it to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHUNK_BYTES_MAX: Final = 1_048_576  # one source or file of Lua
PARTS_BYTES_MAX: Final = 8_388_608  # all sources of one state together


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one attempt of one program may use.

    `slice_cpu_s` is CPU between two operations: the program is stopped there by a soft error that it cannot catch, and
    twice that (and a second) later by the kernel. `slice_wall_s` is the parent's patience with a child that says
    nothing: long, because a slow machine is no fault of the program.
    """

    state_bytes: int = 67_108_864
    child_bytes: int = 2_147_483_648
    slice_cpu_s: float = 2.0
    attempt_cpu_s: float = 60.0
    slice_wall_s: float = 60.0
    output_bytes: int = 33_554_432
    frame_bytes: int = 1_048_576
    operations: int = 100_000
    threads: int = 1_000
    open_branches: int = 4_000  # of all `parallel` together, those among them that have no thread yet
    branch_values: int = 4_000_000  # in the copies of the state that open branches have; a list or object counts as 8
    load_bytes: int = 262_144
    reserve_bytes: int = 16_384  # of a state: room to say where the program was when the rest is used up
    warnings: int = 100
    hook_instructions: int = 4_000

    @property
    def kill_cpu_s(self) -> float:
        """CPU of one slice after which the kernel ends the child: what the soft limit could not stop."""
        return 2 * self.slice_cpu_s + 1
