"""`tga policy check` and `tga policy explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from app.config import Config, load_config
from app.config.tables import qualify
from app.connectors.registry import Registry
from app.core.digest import GENESIS
from app.core.errors import PolicyInvalid, TgaError
from app.domain.policy.cedar import CedarPolicy, Outcome
from app.domain.policy.encoding import Uid, principal_uid, tool_uid
from app.domain.policy.explaining import Explanation, Standing, explain
from app.domain.policy.rules import Rule
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool
from app.gateway.policy_file import load_policy

output = Console(highlight=False, soft_wrap=True)
_ANSWER: Final = {
    "allow": ("green", "ALLOW", "the call is made at once"),
    "ask": ("yellow", "ASK", "the call waits for a person"),
    "deny": ("red", "DENY", "the call is not made"),
}
_TELLING: Final[tuple[Standing, ...]] = ("decides", "could not be evaluated", "applies", "condition not met")


async def configured_misfits(policy: CedarPolicy, config: Config) -> list[str]:
    """The rules that can never match, as far as the configuration tells: what MCP servers have is not asked. Raises
    what a configuration raises that no gateway would start with."""
    registry = Registry.from_config(config)
    try:
        discovering = {qualify(s.tenant, name): s for name, s in config.servers.items() if s.is_mcp}
        expected = [
            Tool(
                server_id,
                name,
                tool.tool_class or "write",
                GENESIS,
                tenant=server.tenant,
                secret_arguments=tuple(tool.secret_arguments),
            )
            for server_id, server in discovering.items()
            for name, tool in server.tools.items()
        ]
        return policy.misfits([*registry.tools(), *expected], undiscovered=discovering.keys())
    finally:
        await registry.close()


async def check_policy(path: Path | None, *, config: Path, as_json: bool) -> bool:
    """True when the gateway would take this policy (None: the packaged one). Raises SettingInvalid if unreadable.

    It is compared with the tools in `config`; a configuration that cannot be used is a warning, as it is not asked for.
    """
    try:
        policy = load_policy(path)
    except PolicyInvalid as error:
        if as_json:
            _print_json({"valid": False, "error": str(error)})
        else:
            output.print("[red]not valid[/]", end="  ")
            output.print(str(error), markup=False)
        return False
    warnings = list(policy.warnings)
    try:
        warnings += await configured_misfits(policy, load_config(config))
    except TgaError as error:
        warnings.append(f"not compared with the tools that there are: {error}")
    if as_json:
        rules = [{"id": r.name, "effect": r.effect, "line": r.line} for r in policy.rules]
        _print_json({"valid": True, "digest": policy.digest, "policies": rules, "warnings": warnings})
        return True
    count = len(policy.rules)
    output.print(f"[green]valid[/]  {count} {'policy' if count == 1 else 'policies'}, digest {policy.digest}")
    for rule in policy.rules:
        _print_rule(rule)
    for warning in warnings:
        output.print("[yellow]warning[/]", end="  ")
        output.print(warning, markup=False)
    return True


def explain_policy(path: Path | None, tool: Tool, request: ActionRequest, *, as_json: bool) -> bool:
    """Print how the policy decides this request, and why. True unless it denies. Raises as `load_policy`."""
    policy = load_policy(path)
    explanation = explain(policy, request, tool)
    if as_json:
        _print_json(_document(policy, explanation, tool, request))
    else:
        _print_explanation(policy, explanation, tool, request)
    return explanation.verdict.answer != "deny"


def _print_explanation(policy: CedarPolicy, explanation: Explanation, tool: Tool, request: ActionRequest) -> None:
    style, word, meaning = _ANSWER[explanation.verdict.answer]
    output.print(f"[{style}]{word}[/]  {meaning}")
    if explanation.verdict.rationale is not None:
        output.print(f"because {explanation.verdict.rationale}", markup=False)
    asker = request.principal
    roles = ", ".join(asker.roles or ()) or "no roles"
    tags = ", ".join(sorted(tool.tags)) or "no tags"
    # As rules must write them: a slash in the owner's name is escaped there, and nowhere else.
    output.print(f"\nasked by  {_entity(principal_uid(asker))} ({roles})", markup=False)
    output.print(f"tool      {_entity(tool_uid(tool))} ({tool.tool_class}, {tags})", markup=False)
    output.print(f"policy    {policy.digest}")
    standings = explanation.standings
    for outcome, of_rules in zip(explanation.outcomes, standings, strict=True):
        # What would follow a denied call decides nothing, and would only mislead.
        if outcome.action == "call_unattended" and not explanation.outcomes[0].is_allowed:
            continue
        _print_outcome(outcome, of_rules)


def _print_outcome(outcome: Outcome, standings: list[tuple[Rule, Standing]]) -> None:
    allowed = "[green]allowed[/]" if outcome.is_allowed else "[red]not allowed[/]"
    output.print(f"\n[bold]{outcome.action}[/]  {allowed}")
    if not outcome.is_allowed:
        output.print(f"  {outcome.why_not()}", markup=False)
    for wanted in _TELLING:
        for rule, standing in standings:
            if standing == wanted:
                _print_rule(rule, standing, is_shown_whole=standing in ("decides", "could not be evaluated"))
    others = sum(standing == "not about this request" for _, standing in standings)
    if others:
        output.print(f"  [dim]{others} more not about this request[/]")


def _print_rule(rule: Rule, standing: str | None = None, *, is_shown_whole: bool = False) -> None:
    told = "" if standing is None else f"{standing}: "
    style = "green" if rule.effect == "permit" else "red"
    output.print(f"  {told}[{style}]{rule.effect}[/] ", end="")
    output.print(f"{rule.name}, line {rule.line}", markup=False)
    if is_shown_whole:
        for number, line in enumerate(rule.statement.text.splitlines(), rule.line):
            output.print(f"    {number:>4} | {line}", markup=False)


def _entity(uid: Uid) -> str:
    return f"{uid['type']}::{json.dumps(uid['id'])}"


def _document(policy: CedarPolicy, explanation: Explanation, tool: Tool, request: ActionRequest) -> dict[str, Any]:
    verdict = explanation.verdict
    return {
        "verdict": verdict.answer,
        "rationale": verdict.rationale,
        "principal": _entity(principal_uid(request.principal)),
        "resource": _entity(tool_uid(tool)),
        "policy_digest": policy.digest,
        "policy_ids": list(verdict.policy_ids),
        "actions": {
            outcome.action: {
                "allowed": outcome.is_allowed,
                "why_not": None if outcome.is_allowed else outcome.why_not(),
                "errors": [
                    {"id": None if fault.rule is None else fault.rule.name, "reason": fault.reason}
                    for fault in outcome.faults
                ],
                "policies": [
                    {"id": r.name, "effect": r.effect, "line": r.line, "standing": standing, "text": r.statement.text}
                    for r, standing in standings
                ],
            }
            for outcome, standings in zip(explanation.outcomes, explanation.standings, strict=True)
        },
    }


def _print_json(document: dict[str, Any]) -> None:
    output.print(json.dumps(document), markup=False)
