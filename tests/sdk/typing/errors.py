"""What an error tells is typed."""

from __future__ import annotations

from typing import assert_type

from tga_sdk import GatewayError, OperationError, TgaError, ToolError


def tell(error: TgaError) -> str:
    assert_type(error.code, str)
    assert_type(error.retryable, bool)
    if isinstance(error, ToolError):
        return str(error.effect)
    if isinstance(error, OperationError):
        return assert_type(error.path, str)
    if isinstance(error, GatewayError):
        assert_type(error.trace_id, str | None)
        return f"{error.status}: {error.message}"
    return error.message
