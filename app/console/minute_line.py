"""The last hour of a server as a small drawing, minute by minute: how slow its slowest calls were, when some failed."""

from __future__ import annotations

from typing import Any, Final

from app.console.components import moment, span

MINUTES: Final = 60
# The picture is as wide as there are minutes. Latency stands on the base, marks of failures hang below it.
_BASE, _TOP = 26.0, 2.0


def minutes_drawn(by_minute: list[dict[str, Any]], now: str) -> dict[str, Any] | None:
    """`stretches`: an area for each stretch of minutes with answered calls, a minute without any leaves a gap.
    `failed`: where a minute with failed calls begins. `label`: the same in words. None where there was no call."""
    last = int(moment(now).timestamp() // 60)
    slowest, failed = dict[int, int](), dict[int, int]()
    for one in by_minute:
        place = min(MINUTES - 1, MINUTES - 1 - last + int(moment(one["began"]).timestamp() // 60))
        if place < 0:
            continue
        if one["p95_ms"] is not None:
            slowest[place] = max(slowest.get(place, 0), one["p95_ms"])
        if one["failed"]:
            failed[place] = failed.get(place, 0) + one["failed"]
    if not slowest and not failed:
        return None
    return {
        "stretches": _stretches(slowest),
        "base": _BASE,
        "failed": sorted(failed),
        "label": _label(slowest, failed),
    }


def _stretches(slowest: dict[int, int]) -> list[str]:
    top, paths = max(slowest.values(), default=1), list[str]()
    for place in sorted(slowest):
        step = f"V{_BASE - (_BASE - _TOP) * slowest[place] / top:.2f}H{place + 1}"
        if place - 1 in slowest:
            paths[-1] += step
        else:
            paths.append(f"M{place} {_BASE:.0f}{step}")
    return [f"{path}V{_BASE:.0f}Z" for path in paths]


def _label(slowest: dict[int, int], failed: dict[int, int]) -> str:
    words = list[str]()
    if slowest:
        newest, worst = max(slowest), max(slowest, key=lambda place: slowest[place])
        words.append(
            f"95 % of calls were answered within {span(slowest[newest])} {_ago(newest)},"
            f" within {span(slowest[worst])} in the slowest minute"
        )
    if failed:
        minutes = "1 minute" if len(failed) == 1 else f"{len(failed)} minutes"
        words.append(f"{sum(failed.values()):,} failed in {minutes}, the last {_ago(max(failed))}")
    return f"The last hour by minute: {'; '.join(words)}."


def _ago(place: int) -> str:
    minutes = MINUTES - 1 - place
    return f"{minutes} min ago" if minutes else "in this minute"
