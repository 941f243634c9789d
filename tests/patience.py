"""How long a test waits for what must happen before it calls it hung.

Never a bound on speed: a machine that is ten times slower passes the same tests. What is to be quick is bounded by the
CPU time or the work that it takes.
"""

from __future__ import annotations

from typing import Final

HANG_S: Final = 120.0
