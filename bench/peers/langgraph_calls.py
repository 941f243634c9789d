"""Calls as graphs of one node under LangGraph's Postgres checkpointer, each a thread of its own. It has no repeats: the
same thread executes its node again. In an environment that has langgraph and langgraph-checkpoint-postgres."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys
from typing import TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from loop import ANSWER, ARGUMENTS, serve
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool


class Call(TypedDict):
    arguments: dict
    answer: dict


async def effect(state: Call) -> dict:
    return {"answer": ANSWER}


async def main(url: str) -> None:
    settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(url, min_size=1, max_size=32, kwargs=settings) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        graph = StateGraph(Call)
        graph.add_node("effect", effect)
        graph.add_edge(START, "effect")
        graph.add_edge("effect", END)
        compiled = graph.compile(checkpointer=saver)

        async def call(worker: int, name: str) -> None:
            config = {"configurable": {"thread_id": name}}
            await compiled.ainvoke({"arguments": ARGUMENTS}, config, durability="sync")

        await serve({"call": call, "repeat": None})


asyncio.run(main(sys.argv[1]))
