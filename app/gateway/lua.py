"""Lua procedures in this gateway: what compiles a submitted program, what the host is told of programs; the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.config import Config
from app.core.errors import LuaUnavailable, ProcedureNotFound, ProcedureSourceInvalid
from app.domain.identity import Principal
from app.domain.runs.procedures import PolicySaid, Procedures
from app.domain.runs.submissions import DeclaredProgram, LintFinding, Submissions
from app.domain.system.log import SystemLog
from app.lua.host import HostSettings, LuaHost, ProgramKey
from app.lua.limits import Limits
from app.lua.lint.child import findings_in
from app.lua.options import LuaOptions
from app.lua.pool import ChildLost
from app.lua.programs import LuaSourceInvalid, Source
from app.postgres.system import PostgresSystemRows

if TYPE_CHECKING:
    from app.edge.services import Services
    from app.gateway.in_process import InProcessTransport

PRINCIPAL_ID = "lua"
_STRICT = ("TGL1", "TGL201")  # findings that refuse a program where the operator is strict


class LuaParts:
    """What a gateway has of Lua. Nothing is started here: a child is when the first program is read, the host when the
    gateway serves."""

    def __init__(self, config: Config, procedures: Procedures, system: SystemLog, rows: PostgresSystemRows) -> None:
        self._config = config.lua
        self._procedures = procedures
        self._system = system
        self._rows = rows
        self._submissions: Submissions | None = None
        self._services: Services | None = None
        self._app: Any = None
        self._known: dict[str, tuple[int, list[ProgramKey]]] = {}
        settings = HostSettings(children=config.lua.children, slots=config.lua.slots)
        self.host: LuaHost | None = None
        if config.lua.enabled:
            self.host = LuaHost(self, self._transport_for, options_of(config), settings)

    def connect(self, services: Services) -> None:
        """The services are there, which need the compiler; the host's requests go to them."""
        self._services = services
        self._submissions = services.submissions

    def program_submitted(self, tenant: str) -> None:
        if self.host is not None:
            self.host.program_submitted(tenant)

    # The Compiler port.

    async def declared(self, name: str, source: str, files: Mapping[str, bytes]) -> DeclaredProgram:
        if self.host is None:
            raise LuaUnavailable(f"the program {name} cannot be executed here")
        program = Source(f"{name}.lua", source, files)
        try:
            declaration, procedure = await self.host.declared(program)
        except LuaSourceInvalid as refused:
            raise ProcedureSourceInvalid(
                f"{refused.chunk}{'' if refused.line is None else f':{refused.line}'} is no program that can run",
                line=refused.line,
                expected=refused.expected,
                found=refused.found,
                remedy=refused.remedy,
            ) from None
        except ChildLost as lost:
            if not lost.is_guilty:
                raise LuaUnavailable(
                    f"the process that reads {name} was lost: {lost}", remedy="Submit it again."
                ) from None
            raise ProcedureSourceInvalid(
                f"the top of {program.name} met a limit",
                expected="declarations, and all work inside run = function() ... end",
                found=lost.reason,
            ) from None
        findings = [
            LintFinding(**{field: found[field] for field in LintFinding.model_fields})
            for found in await findings_in(source, program.name)
        ]
        if self._config.strict_determinism or declaration.metadata.get("strict_determinism") is True:
            _verify_determinism(program.name, findings)
        return DeclaredProgram(
            version=declaration.version,
            description=declaration.description,
            tags=declaration.tags,
            input_schema=declaration.input_schema,
            output_schema=declaration.output_schema,
            state_schema=declaration.state_schema,
            policy=PolicySaid.made_of(procedure.policy.document()),
            findings=findings,
        )

    # The SubmittedPrograms port.

    async def look(self) -> dict[str, Sequence[ProgramKey]]:
        for tenant, last in (await self._rows.load_heads()).items():
            state = self._system.state_of(tenant)
            if state.head.sequence_number < last:
                state = await self._system.refresh(tenant)
            number, _ = self._known.get(tenant, (-1, []))
            if number != state.head.sequence_number:
                programs = [program for known in state.procedures.values() for program in known.values()]
                ours = [
                    ProgramKey(program.name, program.version, program.program_digest)
                    for program in sorted(programs, key=lambda one: one.sequence_number)
                    if program.language == "lua"
                ]
                self._known[tenant] = state.head.sequence_number, ours
        return {tenant: programs for tenant, (_, programs) in self._known.items() if programs}

    async def load(self, tenant: str, key: ProgramKey) -> Source:
        found = await self._procedures.find(tenant, key.name, version=key.version, program_digest=key.program_digest)
        program = None if self._submissions is None else await self._submissions.load(tenant, found)
        if program is None:
            raise ProcedureNotFound(f"nobody has submitted this program of {key.name}", found=key.program_digest)
        return Source(f"{key.name}.lua", program.text, program.files)

    def _transport_for(self, tenant: str) -> InProcessTransport:
        from app.gateway.http_server import Router
        from app.gateway.in_process import InProcessTransport

        if self._services is None:
            raise LuaUnavailable("the gateway is not serving yet")
        if self._app is None:
            self._app = Router(self._services)
        return InProcessTransport(self._app, Principal(principal_id=PRINCIPAL_ID, tenant=tenant, roles=["worker"]))


def options_of(config: Config) -> LuaOptions:
    """What programs may do and use, as the configuration says."""
    lua = config.lua
    limits = Limits(
        state_bytes=lua.memory_bytes,
        slice_cpu_s=lua.slice_cpu_ms / 1000,
        attempt_cpu_s=lua.attempt_cpu_ms / 1000,
        operations=lua.operations,
    )
    return LuaOptions(
        strict_determinism=lua.strict_determinism,
        limits=limits,
        agent_models=lua.agent_models,
        models=lua.models,
        model_folders=tuple(lua.model_folders),
        http_hosts=frozenset(host.partition(":")[0] for host in lua.http.allowed_hosts),
    )


def _verify_determinism(name: str, findings: Sequence[LintFinding]) -> None:
    for finding in findings:
        if finding.code.startswith(_STRICT):
            raise ProcedureSourceInvalid(
                f"{name}:{finding.line} would not be repeated by a replay ({finding.code}); determinism is strict here",
                line=finding.line,
                expected=finding.fix,
                found=finding.what,
            )
