"""How much a process that serves looks through for garbage."""

from __future__ import annotations

import gc

from app.core.limits import GARBAGE_LOOKED_FOR_AFTER


def spare_what_is_loaded() -> None:
    """Called once everything is loaded. Python would look through all that was ever imported again and again, which
    takes a seventh of a call's time; what comes later is looked through as ever.

    And less often: a call under way holds more than a hundred objects that are no garbage, and Python would look
    through those of a few calls again and again, which takes a fifteenth. Objects whose last reference goes are freed
    at once in any case; only what refers to itself waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_LOOKED_FOR_AFTER, *gc.get_threshold()[1:])
