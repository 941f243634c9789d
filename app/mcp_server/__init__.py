"""The gateway as an MCP server: streamable HTTP at /mcp, protocol versions 2026-07-28 and 2025-11-25, no sessions."""
