"""Programs that are sent to the gateway as text, which executes them itself: judged, stored, registered.

1. Sizes are bounded, and the text is compiled and read (the `Compiler` port); a program that cannot run is refused.
2. The policy says whether this principal may submit it.
3. Text and files are stored as blobs, by what they are. A crash here leaves blobs that nothing refers to.
4. The program is registered on the tenant's system stream; the entry refers to its blobs in the same transaction, and a
   system stream is never erased. So a run finds the very program that it is pinned to, whatever is submitted later.
"""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import Field

from app.core.canonical import JsonValue
from app.core.digest import Digest, digest_of
from app.core.errors import InputTooLarge, SchemaViolation, SubmissionDenied
from app.core.limits import LUA_FILE_BYTES_MAX, LUA_FILES_BYTES_MAX, LUA_FILES_MAX, LUA_SOURCE_BYTES_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Sha256
from app.domain.policy.question import AskedSubmission, Verdict
from app.domain.runs.blobs import Blobs
from app.domain.runs.procedures import PolicySaid, Procedures, ProcedureSaid, Registered
from app.domain.system.documents import FileName, ProcedureName, ProcedureRegistration, ProgramSource, SourceFile


class Base64File(Part):
    """A file that is no text."""

    base64: str


class StoredFile(Part):
    """A file that was stored with `PUT /v1/blobs/{sha256}` before."""

    sha256: Sha256


class SubmissionSaid(Part):
    """A program as text. `version`: left out, what the program says of itself. `files`: what it reads with `File`; each
    its text, or where it is no text or large `{"base64": ...}` or `{"sha256": ...}`."""

    name: ProcedureName
    version: Name | None = None
    language: Literal["lua"]
    source: str
    files: dict[FileName, str | Base64File | StoredFile] = Field(default={}, max_length=LUA_FILES_MAX)


class LintFinding(Part):
    """A line that a replay would not repeat, or that cannot work."""

    line: int
    column: int
    code: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class DeclaredProgram:
    """What a program says of itself, and what was found in its text. Schemas are null where any value will do."""

    version: str | None = None
    description: str | None = None
    tags: Sequence[str] = ()
    input_schema: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None
    state_schema: dict[str, Any] | None = None
    policy: PolicySaid = field(default_factory=PolicySaid)
    findings: Sequence[LintFinding] = ()


class Compiler(Protocol):
    """Reads a program's text without running what it does."""

    async def declared(self, name: str, source: str, files: Mapping[str, bytes]) -> DeclaredProgram:
        """ProcedureSourceInvalid with the line; LuaUnavailable where this gateway executes none."""
        ...


class SubmissionSupervisor(Protocol):
    """The policy, as far as submissions are concerned."""

    async def judge_submission(self, asked: AskedSubmission) -> Verdict:
        """`allow` or `deny`; never raises."""
        ...


class Submitted(NamedTuple):
    registered: Registered
    findings: Sequence[LintFinding]


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A submitted program, as it was sent."""

    registration: ProcedureRegistration
    text: str
    files: Mapping[str, bytes]


class Submissions:
    def __init__(
        self, procedures: Procedures, blobs: Blobs, supervisor: SubmissionSupervisor, compiler: Compiler
    ) -> None:
        self._procedures = procedures
        self._blobs = blobs
        self._supervisor = supervisor
        self._compiler = compiler

    async def submit(self, said: SubmissionSaid, principal: Principal) -> Submitted:
        """Durable when it returns, and then runs of it can be started. The same again changes nothing; another text
        under the same version is another program of it, as with workers. Refused, it leaves nothing that counts."""
        text = said.source.encode()
        files = await self._files(said, principal.tenant)
        verify_sizes(text, files)
        declared = await self._compiler.declared(said.name, said.source, files)
        version = said.version or declared.version or "1"
        source = source_of(text, files)
        asked = AskedSubmission(principal, said.name, version, program_digest(source), declared.tags, said.language)
        verdict = await self._supervisor.judge_submission(asked)
        if verdict.answer != "allow":
            raise SubmissionDenied(f"{principal.principal_id} may not submit {said.name}", found=verdict.rationale)
        registration = ProcedureSaid(
            name=said.name,
            version=version,
            program_digest=asked.program_digest,
            language=said.language,
            description=declared.description,
            input_schema=declared.input_schema,
            output_schema=declared.output_schema,
            state_schema=declared.state_schema,
            policy=declared.policy,
            tags=list(declared.tags),
        )
        for content in (text, *files.values()):
            await self._store(principal.tenant, content)
        return Submitted(await self._procedures.register(registration, principal, source=source), declared.findings)

    async def load(self, tenant: str, registration: ProcedureRegistration) -> StoredProgram | None:
        """Text and files of a program, verified; None: it was not submitted. BlobNotFound, or BlobDamaged."""
        source = registration.program_source
        if source is None:
            return None
        text = await self._blobs.read(tenant, Digest(source.sha256), bytes_max=LUA_SOURCE_BYTES_MAX)
        files = {
            one.name: await self._blobs.read(tenant, Digest(one.sha256), bytes_max=LUA_FILE_BYTES_MAX)
            for one in source.files
        }
        return StoredProgram(registration, text.decode(), files)

    async def _files(self, said: SubmissionSaid, tenant: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for name, file in sorted(said.files.items()):
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise SchemaViolation(
                    f"the body at /files/{name}", expected="a name without empty parts, . and ..", found=name
                )
            match file:
                case str():
                    files[name] = file.encode()
                case Base64File():
                    try:
                        files[name] = b64decode(file.base64, validate=True)
                    except (binascii.Error, ValueError):
                        raise SchemaViolation(f"the body at /files/{name}/base64", expected="Base64") from None
                case StoredFile():
                    files[name] = await self._blobs.read(tenant, Digest(file.sha256), bytes_max=LUA_FILE_BYTES_MAX)
        return files

    async def _store(self, tenant: str, content: bytes) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        await self._blobs.put(tenant, _sha256(content), pieces(), stated_bytes=len(content))


def verify_sizes(text: bytes, files: Mapping[str, bytes]) -> None:
    """Raise InputTooLarge unless a program may be so large; SchemaViolation when there is no text."""
    if not text.strip():
        raise SchemaViolation("the body at /source", expected="a program", found="nothing")
    if len(text) > LUA_SOURCE_BYTES_MAX:
        raise InputTooLarge(
            "the source is too large",
            expected=f"at most {LUA_SOURCE_BYTES_MAX} bytes",
            found=f"{len(text)} bytes",
            remedy="Keep data out of the program: submit it as files, or give it to the run as input.",
        )
    for name, content in files.items():
        if len(content) > LUA_FILE_BYTES_MAX:
            raise InputTooLarge(
                f"the file {name} is too large",
                expected=f"at most {LUA_FILE_BYTES_MAX} bytes",
                found=f"{len(content)} bytes",
                remedy="Split it, or have the program fetch what it needs through a tool.",
            )
    whole = sum(map(len, files.values()))
    if whole > LUA_FILES_BYTES_MAX:
        raise InputTooLarge(
            "the program's files are too large together",
            expected=f"at most {LUA_FILES_BYTES_MAX} bytes",
            found=f"{whole} bytes",
            remedy="Submit fewer files, or have the program fetch what it needs through a tool.",
        )


def source_of(text: bytes, files: Mapping[str, bytes]) -> ProgramSource:
    kept = [SourceFile(name=name, sha256=_sha256(data), size_bytes=len(data)) for name, data in sorted(files.items())]
    return ProgramSource(sha256=_sha256(text), size_bytes=len(text), files=kept)


def program_digest(source: ProgramSource) -> Digest:
    """Of text and files, with their names: another byte in any of them is another program."""
    files: JsonValue = {one.name: one.sha256 for one in source.files}
    return digest_of({"language": "lua", "source": source.sha256, "files": files})


def _sha256(content: bytes) -> Digest:
    return Digest(hashlib.sha256(content).hexdigest())
