"""Icons of the sprite in templates/_sprite.html."""

from __future__ import annotations

from markupsafe import Markup


def icon(name: str, classes: str = "", label: str | None = None) -> Markup:
    """`label` is for those who hear the page; without one the icon is decoration."""
    if label is None:
        return Markup('<svg class="i {}" aria-hidden="true"><use href="#i-{}"/></svg>').format(classes, name)
    return Markup('<svg class="i {}" role="img" aria-label="{}"><use href="#i-{}"/></svg>').format(classes, label, name)
