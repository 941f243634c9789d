"""Overview: does anything need me, is the record sound?"""

from __future__ import annotations

from starlette.responses import Response

from app.console.visit import Visit


async def show(visit: Visit) -> Response:
    waiting = await visit.api.get("/v1/approvals", limit=50)
    return await visit.page("overview.html", nav="Overview", waiting=waiting["items"])
