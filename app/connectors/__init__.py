"""Connectors: how a tool call reaches its server, and which servers and tools there are."""
