"""What a client answers is typed."""

from __future__ import annotations

from typing import Any, assert_type

from pydantic import BaseModel

from tga_sdk import ApprovalPending, AsyncClient, CallFailed, Client, Result, Run, TgaError, key_for


class Done(BaseModel):
    number: int


def call(client: Client) -> Any:
    assert_type(key_for("order", 7), str)
    try:
        result = client.call("bank", "charge", {"amount": 7}, key=key_for("order", 7), wait="forever")
    except ApprovalPending as error:
        return assert_type(error.trace_id, str | None)
    except CallFailed as error:
        return assert_type(error.output, Any)
    except TgaError as error:
        assert_type(error.may_have_run, bool)
        return assert_type(error.key, str | None)
    assert_type(result, Result)
    for entry in client.events(result.trace_id):
        assert_type(entry.kind, str)
    return result.output


def run(client: Client) -> int:
    started = assert_type(client.start("onboard", {"email": "a@example.org"}, "run-7"), Run)
    assert_type([one.run_id for one in client.list(status="running")], list[str])
    assert_type(client.result(started.run_id, list[str]), list[str])
    return assert_type(client.result(started.run_id, Done, timeout=5), Done).number


async def run_async(client: AsyncClient) -> Done:
    async for entry in client.watch("run-7", after=3):
        assert_type(entry.state, str)
    assert_type((await client.approvals())[0].kind, str)
    return await client.result("run-7", Done)
