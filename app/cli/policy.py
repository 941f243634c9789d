"""`tga policy check` and `tga policy explain`: what a policy is worth, and why it decides as it does. On the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from rich.console import Console

from app.cli.calls import parse_arguments
from app.cli.running import (
    ArgumentPairs,
    AsJson,
    ServerArgument,
    Tenant,
    ToolArgument,
    context_of,
    refuse,
    run,
)
from app.cli.showing import notes
from app.clock import SystemClock
from app.config import Config, load_config
from app.config.tables import qualify
from app.connectors.registry import Registry
from app.core.canonical import parse_json
from app.core.digest import GENESIS
from app.core.errors import PolicyInvalid, TgaError
from app.domain.identity import DEFAULT_TENANT, Principal, Role
from app.domain.policy.cedar import CedarPolicy, Outcome
from app.domain.policy.encoding import Uid, principal_uid, procedure_uid, tool_uid
from app.domain.policy.explaining import (
    Explanation,
    Standing,
    entity_text,
    explain,
    explain_start,
    explanation_document,
)
from app.domain.policy.question import AskedStart
from app.domain.policy.rules import Rule
from app.domain.runs.documents import Trigger
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool
from app.edge.explaining import SupposedCall, request_of
from app.gateway.policy_file import load_policy
from app.settings import Settings

_ROLES: Final = ", ".join(get_args(Role))
_TRIGGERS: Final = ", ".join(get_args(Trigger.model_fields["type"].annotation))

commands = typer.Typer(help="The Cedar policy: check a file, and ask why.", no_args_is_help=True)
output = Console(highlight=False, soft_wrap=True)
_ANSWER: Final = {
    "allow": ("green", "ALLOW", "the call is made at once"),
    "ask": ("yellow", "ASK", "the call waits for a person"),
    "deny": ("red", "DENY", "the call is not made"),
}
_TELLING: Final[tuple[Standing, ...]] = ("decides", "could not be evaluated", "applies", "condition not met")


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="policy")


@commands.command("check")
def check_policy_command(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The policy; else the one that is configured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Whether the gateway would take this policy, and what is in it; exit 1 if it would not.

    Without FILE: the one that the configuration names, as the gateway would load it, else the packaged one. Warns of
    rules that can never match the configured tools; what MCP servers have is not asked."""

    async def work() -> bool:
        config_file = context_of(context).settings.config_file
        path = file
        if path is None:
            named = load_config(config_file).policy
            path = None if named is None else named.file
            where = "the packaged policy; none is configured" if path is None else path
            notes.print(f"Checking {where} ({config_file})", markup=False)
        return await check_policy(path, config=config_file, as_json=as_json)

    run(work())


@commands.command("explain")
def explain_policy_command(
    context: typer.Context,
    server: ServerArgument,
    tool: ToolArgument,
    argument: ArgumentPairs = None,
    text: Annotated[
        str | None, typer.Option("--arguments", help="All arguments as one JSON object; - reads stdin.")
    ] = None,
    principal: Annotated[str, typer.Option("--principal", help="Who would ask.")] = "someone",
    role: Annotated[list[str] | None, typer.Option("--role", help=f"With which roles: {_ROLES}.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    intent: Annotated[str | None, typer.Option("--intent", help="What it would be for.")] = None,
    in_run: Annotated[
        str | None,
        typer.Option("--in-run", metavar="PROCEDURE[@VERSION]", help="As a call that a run of this procedure makes."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which policy decides this call, and why. Nothing is called; exit 1 if it would be denied."""
    if argument and text is not None:
        refuse("give arguments with -a or with --arguments, not both")

    async def work() -> bool:
        return await explain_call(
            context_of(context).settings,
            server,
            tool,
            parse_arguments(argument or [], text),
            principal_fields={"principal_id": principal, "tenant": tenant, "roles": role or ["agent"]},
            intent=intent,
            in_run=in_run,
            as_json=as_json,
        )

    run(work())


@commands.command("explain-start")
def explain_start_command(
    context: typer.Context,
    procedure: Annotated[str, typer.Argument(metavar="PROCEDURE", help="The procedure's name.")],
    text: Annotated[str, typer.Option("--input", help="The input, as JSON.")] = "null",
    version: Annotated[str, typer.Option("--version", help="Of which version.")] = "1",
    digest: Annotated[str, typer.Option("--digest", help="Which program of it.")] = GENESIS,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="With which tags; may be repeated.")] = None,
    trigger: Annotated[str, typer.Option("--trigger", help=f"What starts it: {_TRIGGERS}.")] = "call",
    principal: Annotated[str, typer.Option("--principal", help="Who would start it.")] = "someone",
    role: Annotated[list[str] | None, typer.Option("--role", help=f"With which roles: {_ROLES}.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Which policy decides this start of a procedure, and why. Nothing is started; exit 1 if it would be denied.

    What is registered is not asked: version, program and tags are as the options say."""

    async def work() -> bool:
        if trigger not in get_args(Trigger.model_fields["type"].annotation):
            refuse(f"--trigger is one of {_TRIGGERS}")
        asker = Principal.made(principal_id=principal, tenant=tenant, roles=role or ["agent"])
        given = parse_json(text.encode())
        asked = AskedStart(asker, procedure, version, digest, tag or [], given, trigger)
        config = load_config(context_of(context).settings.config_file)
        return explain_start_policy(config.policy.file if config.policy else None, asked, as_json=as_json)

    run(work())


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


async def explain_call(
    settings: Settings,
    server: str,
    tool_name: str,
    arguments: dict[str, Any],
    *,
    principal_fields: dict[str, Any],
    intent: str | None,
    in_run: str | None = None,
    as_json: bool,
) -> bool:
    """True unless the policy denies it. ToolNotFound and ArgumentsInvalid where the gateway would answer with them."""
    config = load_config(settings.config_file)
    registry = Registry.from_config(config)
    try:
        principal = Principal.made(**principal_fields)
        procedure, _, version = (in_run or "").partition("@")
        call = SupposedCall(server, tool_name, arguments, intent, procedure or None, version or "1")
        tool, request = request_of(registry, SystemClock(), principal, call)
        return explain_policy(config.policy.file if config.policy else None, tool, request, as_json=as_json)
    finally:
        await registry.close()


def explain_policy(path: Path | None, tool: Tool, request: ActionRequest, *, as_json: bool) -> bool:
    """Print how the policy decides this request, and why. True unless it denies. Raises as `load_policy`."""
    policy = load_policy(path)
    explanation = explain(policy, request, tool)
    tags = ", ".join(sorted(tool.tags)) or "no tags"
    about = f"tool      {entity_text(tool_uid(tool))} ({tool.tool_class}, {tags})"
    return _told(policy, explanation, request.principal, tool_uid(tool), about, as_json=as_json)


def explain_start_policy(path: Path | None, asked: AskedStart, *, as_json: bool) -> bool:
    """Print how the policy decides this start, and why. True unless it denies. Raises as `load_policy`."""
    policy = load_policy(path)
    explanation = explain_start(policy, asked)
    tags = ", ".join(sorted(asked.tags)) or "no tags"
    about = f"procedure {entity_text(procedure_uid(asked))} ({asked.version}, {tags})"
    return _told(policy, explanation, asked.principal, procedure_uid(asked), about, as_json=as_json)


def _told(
    policy: CedarPolicy, explanation: Explanation, asker: Principal, resource: Uid, about: str, *, as_json: bool
) -> bool:
    if as_json:
        _print_json(explanation_document(policy, explanation, asker, resource))
    else:
        _print_explanation(policy, explanation, asker, about)
    return explanation.verdict.answer != "deny"


def _print_explanation(policy: CedarPolicy, explanation: Explanation, asker: Principal, about: str) -> None:
    style, word, meaning = _ANSWER[explanation.verdict.answer]
    if explanation.outcomes[0].action == "start":
        meaning = "the run is started" if explanation.verdict.answer == "allow" else "the run is not started"
    output.print(f"[{style}]{word}[/]  {meaning}")
    if explanation.verdict.rationale is not None:
        output.print(f"because {explanation.verdict.rationale}", markup=False)
    roles = ", ".join(asker.roles or ()) or "no roles"
    # As rules must write them: a slash in the owner's name is escaped there, and nowhere else.
    output.print(f"\nasked by  {entity_text(principal_uid(asker))} ({roles})", markup=False)
    output.print(about, markup=False)
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


def _print_json(document: dict[str, Any]) -> None:
    output.print(json.dumps(document), markup=False)
