"""What people did: who decided, resolved, answered, cancelled, accepted, and why. For whoever sees the whole tenant."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.responses import Response

from app.console.rendering import PATH
from app.console.visit import Visit

SHOWN: Final = 50
# By act: the icon, and the words before and after what it was done to.
_WORDS: Final[dict[str, tuple[str, str, str]]] = {
    "approved": ("check-o", "approved", ""),
    "denied": ("slash", "denied", ""),
    "withdrew": ("slash", "withdrew the request for", ""),
    "resolved_as_succeeded": ("check-f", "recorded that", "happened"),
    "resolved_as_failed": ("x-f", "recorded that", "did not happen"),
    "redispatched": ("play", "had", "sent once more"),
    "answered": ("person", "answered the run", ""),
    "signalled": ("down", "sent a signal to the run", ""),
    "cancelled": ("x", "cancelled the run", ""),
    "resumed": ("play", "had the run", "go on"),
    "forked": ("fork", "forked {} as", ""),
    "accepted_tool": ("shield", "accepted the changed tool", ""),
    "erased": ("slash", "erased the payloads of the {}", ""),
    "announced_key": ("key", "announced the signing key", ""),
    "retired_key": ("key", "retired the signing key", ""),
    "began_epoch": ("tree", "began a new epoch of the log, number", ""),
}
_ABOUT: Final = {
    "answered": "the question at {}",
    "signalled": "the signal {}",
    "resumed": "with version {}",
}


async def show(visit: Visit) -> Response:
    cursor = visit.query.get("cursor")
    if not visit.may("read_tenant"):
        return await visit.page("acts.html", nav="Ledger", status=403, acts=None)
    page = await visit.api.get("/v1/acts", limit=SHOWN, cursor=cursor)
    return await visit.page(
        "acts.html",
        nav="Ledger",
        acts=[described(one) for one in page["items"]],
        older=f"{PATH}/acts?{urlencode({'cursor': page['next']})}" if page["next"] else None,
        newest=f"{PATH}/acts" if cursor else None,
    )


def described(one: dict[str, Any]) -> dict[str, Any]:
    """An act as a sentence: its words, what it was done to and the page of that."""
    icon, before, after = _WORDS[one["act"]]
    kind, _, name = (one["about"] or "").partition(":")
    if one["act"] == "erased":
        before, thing = before.format("call" if kind == "trace" else "run"), name
    else:
        before, thing = before.format(one["about"]), one["id"] or one["about"]
    if one["server_id"] is not None:
        thing = None
    detail = _ABOUT[one["act"]].format(one["about"]) if one["act"] in _ABOUT and one["about"] else None
    return {**one, "icon": icon, "before": before, "after": after, "thing": thing, "detail": detail, "to": _page(one)}


def _page(one: dict[str, Any]) -> str | None:
    if one["kind"] == "trace":
        return f"{PATH}/calls/{one['id']}"
    if one["kind"] == "run":
        return f"{PATH}/runs/{quote(one['id'], safe='')}?at={one['sequence_number']}"
    if one["act"] == "accepted_tool":
        return f"{PATH}/servers"
    if one["act"] == "erased" and one["about"]:
        kind, _, name = one["about"].partition(":")
        return f"{PATH}/{'calls' if kind == 'trace' else 'runs'}/{quote(name, safe='')}"
    return None
