"""What `tga doctor` finds of the tool servers, as the running gateway sees them: the gateway has tried them, and says
why one cannot be called. Those of other tenants are known from /readyz alone, without what they complained of.

Of MCP servers it names the writes for which no operator has chosen what happens when the outcome is unknown. Most of
these servers ignore the idempotency key, and the default sends again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from app.cli.client import GatewayClient
from app.cli.findings import Finding

_NAMES_TOLD_MAX: Final = 8


async def server_findings(client: GatewayClient, ready: dict[str, Any]) -> AsyncIterator[Finding]:
    """A server that is down is wrong; one that is still starting deserves a look."""
    servers = (await client.get("/v1/servers"))["items"]
    for server in servers:
        yield _of_status(server["server_id"], server["status"], (server["connection"] or {}).get("stderr", ""))
    own = {server["server_id"] for server in servers}
    for server in ready.get("servers", ()):
        if server["server_id"] not in own:
            status = {"state": server["state"], "since": server["since"], "last_error": server.get("reason")}
            yield _of_status(server["server_id"], status)
    tools = (await client.get("/v1/tools"))["items"]
    for server in servers:
        if server["transport"].startswith("mcp-"):
            for finding in _unchosen(server["server_id"], tools):
                yield finding


def _unchosen(server_id: str, tools: list[dict[str, Any]]) -> Iterator[Finding]:
    names = [
        tool["tool_name"]
        for tool in tools
        if tool["server_id"] == server_id and tool["tool_class"] == "write" and not tool["on_unknown_outcome_chosen"]
    ]
    if names:
        more = f" and {len(names) - _NAMES_TOLD_MAX} more" if len(names) > _NAMES_TOLD_MAX else ""
        found = f"nobody chose on_unknown_outcome for {', '.join(names[:_NAMES_TOLD_MAX])}{more}"
        remedy = (
            "After a lost answer such a call is sent again, and a server that ignores the idempotency key executes it "
            f'twice. Choose in [servers.{server_id}.tools.{names[0]}]: on_unknown_outcome = "hold" waits for an '
            'operator, "reconcile" asks a read tool, "redispatch" is right where the server honours the key.'
        )
        yield Finding(f"writes of {server_id}", True, found, remedy, warning=True)


def _of_status(name: str, status: dict[str, Any], stderr: str = "") -> Finding:
    what, since = f"server {name}", f"since {status['since']}"
    match status["state"]:
        case "down":
            remedy = status.get("remedy") or "`tga servers` with a key of its tenant says what to do."
            complaint = f". The last it wrote to stderr: {stderr.strip().splitlines()[-1]}" if stderr.strip() else ""
            return Finding(what, False, f"down {since}: {status['last_error']}{complaint}", remedy)
        case "starting":
            remedy = "Its tools appear when it is ready; `tga servers` shows how it stands."
            return Finding(what, True, f"starting {since}", remedy, warning=True)
    return Finding(what, True, f"{status['state']} {since}")
