"""A server made with the official package, over streamable HTTP: both protocols, and tools that change.

official_server.py PORT
"""

from __future__ import annotations

import sys
from typing import Any

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("official")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def grow(ctx: Context[Any, Any]) -> str:
    """Get one tool more."""
    server.add_tool(lambda: "new", name="grown", description="It has grown.")
    await ctx.notify_tools_changed()  # to who listens, as 2026-07-28 has it
    await ctx.session.send_tool_list_changed()  # to the session, as 2025-11-25 has it
    return "grown"


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
