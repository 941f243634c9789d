"""What programs get of tools whose answers are no JSON: in Python and in Lua, live and from the record, on a real
gateway and a real tool server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.connectors.servers import raw_server
from tests.lua.hosting import Person, config
from tests.runs.world import RunsWorld, worlds
from tga_sdk import Context, Worker, procedure

BODIES = [b"", b"plain text \xc3\xa4", b"\x00\xff\xfe"]


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


@procedure(name="asks-a-strange-tool")
async def asks(ctx: Context[None]) -> list[str]:
    """It waits in between: the second attempt has the first answers from the record."""
    got = [repr(await ctx.tool("strange", "any", {})) for _ in BODIES]
    await ctx.approve("Go on?")
    return [*got, str(ctx.attempt)]


IN_LUA = """
local got = {}
for i = 1, 3 do
    local found = tool.strange.any{}
    got[i] = type(found) == 'table' and {encoding = found.encoding, data = found.data} or tostring(found)
end
Human.approve{message = 'Go on?'}
return got
"""


async def test_an_empty_answer_is_nothing_a_text_is_a_text_and_bytes_are_bytes(world: RunsWorld) -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        body = BODIES[(count - 1) % 3]
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with raw_server(answer) as server:
        path = config(world)
        strange = f'[servers.strange]\ntransport = "http"\nbase_url = "{server.url}"\n'
        path.write_text(path.read_text() + f'\n{strange}[servers.strange.tools.any]\nclass = "write"\n')
        gateway = await world.gateway(config=path)
        agent, supervisor = (Person(gateway.url, world.keys[role]) for role in ("agent", "supervisor"))
        ready = asyncio.Event()
        worker = Worker(gateway.url, world.keys["worker"], [asks], on_ready=ready.set)
        working = asyncio.create_task(worker.run(signals=False))
        await ready.wait()
        await agent.submitted("strange-in-lua", IN_LUA)
        outputs = []
        for name in ("asks-a-strange-tool", "strange-in-lua"):
            run_id = await agent.start(name)
            run = await agent.rested(run_id, "waiting_for_human")
            assert run["state"] == "WAITING", run
            await supervisor.ask("POST", f"/v1/runs/{run_id}/signals", {"path": "4", "answer": True})
            outputs.append((await agent.rested(run_id))["output"]["value"])
        worker.stop()
        await working
    assert len(server.requests) == 6
    assert outputs[0] == ["None", repr(BODIES[1]), repr(BODIES[2]), "2"]
    assert outputs[1] == ["nil", "plain text ä", {"encoding": "base64", "data": "AP/+"}]
