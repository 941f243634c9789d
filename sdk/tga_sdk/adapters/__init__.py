"""The gateway's tools as those of a framework. Each module needs its framework, and names the extra when it is missing.

| module | framework | extra |
|---|---|---|
| `tga_sdk.adapters.pydantic_ai` | pydantic-ai | `pydantic-ai` |
| `tga_sdk.adapters.langchain` | LangChain, LangGraph | `langchain` |
| `tga_sdk.adapters.openai_agents` | OpenAI Agents SDK | `openai-agents` |
| `tga_sdk.adapters.claude_agent` | Claude Agent SDK | `claude-agent` |

A framework that speaks MCP needs none of them: the gateway itself is an MCP server, at `/mcp`.
"""
