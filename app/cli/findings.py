"""What `tga doctor` finds: one thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` is what to do when it is wrong, or what might be worth doing; `warning`:
    it is right, and somebody should look at it all the same."""

    what: str
    is_right: bool
    found: str
    remedy: str | None = None
    warning: bool = False
