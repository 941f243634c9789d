"""Policy and keys: why is this decided so?"""

from __future__ import annotations

import asyncio
import json
from shlex import quote
from typing import Any, Final

from starlette.responses import Response

from app.console.gateway_api import ApiProblem
from app.console.visit import Visit

_VERDICTS: Final = {
    "allow": ("check-f", "It is called at once"),
    "ask": ("person", "A person decides"),
    "deny": ("slash", "It is denied"),
}
_QUESTIONS: Final = (("call", "May it be called?"), ("call_unattended", "Without a person?"))


async def show(visit: Visit) -> Response:
    asked = {name: visit.query.get(name, "") for name in ("principal", "tool", "arguments")}
    policy, sets, keys, tools, stats, told = await asyncio.gather(
        visit.api.find("/v1/policy"),
        visit.api.find("/v1/policy/sets", limit=10),
        visit.api.find("/v1/keys", limit=100),
        visit.api.get("/v1/tools"),
        visit.api.find("/v1/stats", since=visit.clock.after(-86_400_000)),
        _explained(visit, asked),
    )
    explained, problem = told
    return await visit.page(
        "policy.html",
        nav="Policy & keys",
        policy=policy,
        sets=[] if sets is None else sets["items"],
        sets_go_on=sets is not None and sets["next"] is not None,
        keys=None if keys is None else keys["items"],
        keys_go_on=keys is not None and keys["next"] is not None,
        tools=[f"{one['server_id']}/{one['tool_name']}" for one in tools["items"]],
        asked=asked,
        explained=explained,
        questions=[] if explained is None else [(words, explained["actions"][name]) for name, words in _QUESTIONS],
        verdict=None if explained is None else _VERDICTS[explained["verdict"]],
        deciding=set() if explained is None else _deciding(explained),
        decided=None if stats is None else stats["rules"],
        command=_command(asked),
        problem=problem,
    )


def _command(asked: dict[str, str]) -> str:
    """The same question for a shell."""
    server_id, _, tool_name = asked["tool"].partition("/")
    parts = ["tga", "policy", "explain", server_id, tool_name]
    if asked["arguments"].strip() not in ("", "{}"):
        parts += ["--arguments", asked["arguments"].strip()]
    if asked["principal"]:
        parts += ["--principal", asked["principal"]]
    return " ".join(map(quote, parts))


async def _explained(visit: Visit, asked: dict[str, str]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What the gateway says of the call in the address, or why it cannot be said. Nothing is stored."""
    if not asked["tool"] or not visit.may("read_policy"):
        return None, None
    server_id, _, tool_name = asked["tool"].partition("/")
    try:
        arguments = json.loads(asked["arguments"] or "{}")
    except ValueError as error:
        return None, {
            "code": "INPUT_MALFORMED",
            "title": "The arguments are not JSON",
            "detail": f"The arguments are not JSON: {error}. Nothing was asked.",
        }
    body = {"server_id": server_id, "tool_name": tool_name, "arguments": arguments}
    try:
        given = body | ({"principal_id": asked["principal"]} if asked["principal"] else {})
        return (await visit.api.post("/v1/policy/explain", given)).document, None
    except ApiProblem as problem:
        return None, problem.document


def _deciding(explained: dict[str, Any]) -> set[str]:
    """The rules on which the verdict rests: those of the question that was answered no, or of both."""
    actions = explained["actions"]
    refused = next((name for name, _ in _QUESTIONS if not actions[name]["allowed"]), None)
    asked = [actions[name] for name, _ in _QUESTIONS if refused in (None, name)]
    return {rule["id"] for action in asked for rule in action["policies"] if rule["standing"] == "decides"}
