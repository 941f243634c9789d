"""Adapters whose frameworks are not in the lock: each is installed into a venv of its own, and its example run against
a real gateway. Under TGA_SOAK=1 alone: the venvs come from the package index."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.sdk.gateways import Gateways, new_key

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900

pytestmark = pytest.mark.skipif(
    not IS_SOAK,
    reason="NOT TRIED: adapters of LangChain, OpenAI Agents and Claude Agent; TGA_SOAK=1 installs them",
)

# The same tool call twice, in two processes, as a framework does that goes on from a checkpoint.
REPEATS = {
    "langchain": """
        from tga_sdk.adapters.langchain import gateway_tools
        (tool,) = gateway_tools(only=["bank/charge"])
        call = {"type": "tool_call", "id": "call-1", "name": tool.name, "args": {"amount": 5}}
        print(tool.invoke(call, {"configurable": {"thread_id": SCOPE}}).content)
        import asyncio
        print(asyncio.run(tool.ainvoke(call, {"configurable": {"thread_id": SCOPE}})).content)
        from tga_sdk.adapters.langchain import async_gateway_tools
        async def other():
            (awaited,) = await async_gateway_tools(only=["bank/charge"], scope=SCOPE)
            print((await awaited.ainvoke(call)).content)
        asyncio.run(other())
    """,
    "openai-agents": """
        import asyncio
        from agents.tool_context import ToolContext
        from tga_sdk.adapters.openai_agents import gateway_tools
        async def main():
            (tool,) = await gateway_tools(only=["bank/charge"], scope=SCOPE)
            context = ToolContext(None, tool_name=tool.name, tool_call_id="call-1", tool_arguments="{}")
            print(await tool.on_invoke_tool(context, '{"amount": 5}'))
            assert "no JSON object" in await tool.on_invoke_tool(context, "[")
        asyncio.run(main())
    """,
    "claude-agent": """
        import asyncio
        from mcp import Client
        from tga_sdk.adapters.claude_agent import TOOL_USE_ID, gateway_server
        async def main():
            server = (await gateway_server(only=["bank/charge"], scope=SCOPE))["instance"]
            async with Client(server) as client:
                (tool,) = (await client.list_tools()).tools
                done = await client.call_tool(tool.name, {"amount": 5}, meta={TOOL_USE_ID: "call-1"})
                print(done.content[0].text)
                assert (await client.call_tool("nonsense", {})).is_error
        asyncio.run(main())
    """,
}
EXAMPLES = {
    "langchain": ("langgraph_agent", ["langgraph"]),
    "openai-agents": ("openai_agent", []),
    "claude-agent": ("claude_agent", []),
}


@pytest.fixture(scope="module", params=sorted(EXAMPLES))
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The extra, and the python of a venv with the SDK and that extra alone."""
    extra: str = request.param
    place = tmp_path_factory.mktemp("venv") / extra
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place], check=True, timeout=PATIENCE_S)
    python = place / "bin" / "python"
    wanted = [f"{ROOT / 'sdk'}[{extra}]", *EXAMPLES[extra][1]]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *wanted], check=True, timeout=PATIENCE_S)
    return extra, python


async def run(gateways: Gateways, python: Path, *arguments: str) -> str:
    environment = {
        "TGA_URL": gateways.url,
        "TGA_API_KEY": gateways.world.keys["agent"],
        "PATH": os.environ["PATH"],
        "HOME": str(python.parent),
    }
    command = [str(python), *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


async def test_its_example_runs_as_it_is_printed(installed: tuple[str, Path], gateways: Gateways) -> None:
    extra, python = installed
    before = sum(gateways.world.all_executions().values())
    said = await run(gateways, python, str(ROOT / "examples" / "adapters" / f"{EXAMPLES[extra][0]}.py"))
    places = [said.find(words) for words in ("do not fit", "charge_id", "has to approve")]
    assert places == sorted(places), said
    assert -1 not in places, said
    assert sum(gateways.world.all_executions().values()) == before + 1


async def test_a_tool_call_that_is_repeated_in_another_process_is_executed_once(
    installed: tuple[str, Path], gateways: Gateways
) -> None:
    extra, python = installed
    scope = new_key(extra)
    program = f"SCOPE = {scope!r}\n" + textwrap.dedent(REPEATS[extra])
    told = [await run(gateways, python, "-c", program) for _ in range(2)]
    assert told[0] == told[1]
    assert len(set(told[0].splitlines())) == 1
    (key,) = [key for key in gateways.world.all_executions() if scope in key]
    assert gateways.executions(key) == 1


async def test_the_others_name_their_extras(installed: tuple[str, Path], gateways: Gateways) -> None:
    extra, python = installed
    others = {"langchain": "openai_agents", "openai-agents": "claude_agent", "claude-agent": "langchain"}
    program = f"""
import tga_sdk
try:
    import tga_sdk.adapters.{others[extra]}
except tga_sdk.ExtraMissing as error:
    print(error)
"""
    assert f"tga-sdk[{others[extra].replace('_', '-')}]" in await run(gateways, python, "-c", program)
