"""How much a process that serves looks through for garbage."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Called once everything is loaded. Python would look through all that was ever imported again and again, which
    takes a seventh of a call's time; what comes later is looked through as ever."""
    gc.collect()
    gc.freeze()
