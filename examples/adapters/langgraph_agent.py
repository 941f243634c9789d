"""An agent of LangGraph with the tools of a gateway. The model is scripted, so it runs without any account:

pip install 'tga-sdk[langchain]' langgraph
python examples/adapters/langgraph_agent.py      # while `make run` runs, with TGA_HOME=.tga
"""

from __future__ import annotations

import uuid
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tga_sdk.adapters.langchain import gateway_tools

TURNS = [("bank_charge", {"amount": "much"}), ("bank_charge", {"amount": 42}), ("bank_refund", {"amount": 42})]


def scripted(state: Any) -> dict[str, Any]:
    """What a model would say: the next turn of the script, then what it was told."""
    number = sum(isinstance(message, AIMessage) for message in state["messages"])
    if number < len(TURNS):
        name, args = TURNS[number]
        return {"messages": [AIMessage("", tool_calls=[{"id": f"call-{number}", "name": name, "args": args}])]}
    told = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    return {"messages": [AIMessage("\n".join(f"{one.status}: {one.content}" for one in told))]}


def main() -> None:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", scripted)
    graph.add_node("tools", ToolNode(gateway_tools(only=["bank"])))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    # The thread's id makes the ids of tool calls unique: what LangGraph repeats after a crash is executed once.
    thread = {"configurable": {"thread_id": str(uuid.uuid4())}}
    end = graph.compile().invoke({"messages": [("user", "Charge 42, then refund it.")]}, thread)
    print(end["messages"][-1].content)


if __name__ == "__main__":
    main()
