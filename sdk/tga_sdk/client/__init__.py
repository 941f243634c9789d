"""Calling tools, deciding, and running procedures over a gateway: `Client`, and `AsyncClient` with `await`."""

from tga_sdk.client.async_client import AsyncClient
from tga_sdk.client.calls import FOREVER
from tga_sdk.client.documents import (
    Approval,
    Entry,
    Moved,
    Result,
    Run,
    RunItem,
    RunState,
    Started,
    Tool,
    Trace,
    TraceItem,
    Triggered,
)
from tga_sdk.client.sync_client import Client

__all__ = [
    "FOREVER",
    "Approval",
    "AsyncClient",
    "Client",
    "Entry",
    "Moved",
    "Result",
    "Run",
    "RunItem",
    "RunState",
    "Started",
    "Tool",
    "Trace",
    "TraceItem",
    "Triggered",
]
