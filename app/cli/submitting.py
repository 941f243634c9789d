"""`tga run start FILE.lua`: a program in Lua is sent to the gateway, which executes it, and a run of it is started."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path
from typing import Any, Final, NamedTuple

from app.cli.client import GatewayClient
from app.cli.running import refuse
from app.cli.showing import counted, notes, printable
from app.core.errors import InputTooLarge, ProcedureSourceInvalid, SettingInvalid
from app.core.limits import DOCUMENT_BYTES_MAX, LUA_FILE_BYTES_MAX, LUA_FILES_MAX, LUA_SOURCE_BYTES_MAX

_ENDINGS: Final = (".lua", ".tactus", ".tac")
_INLINE_BYTES_MAX: Final = DOCUMENT_BYTES_MAX // 4  # of all files together; larger ones are blobs first


class SubmittedFile(NamedTuple):
    """A program as it stands in files here."""

    name: str
    source: str
    files: dict[str, bytes]


def is_program_file(text: str) -> bool:
    return text.endswith(".lua")


def read_program(path: Path, files: list[str], *, name: str | None) -> SubmittedFile:
    """The program and its files; SettingInvalid or InputTooLarge for what cannot be sent."""
    try:
        source = _read(path, LUA_SOURCE_BYTES_MAX).decode()
    except UnicodeDecodeError as error:
        raise SettingInvalid(f"{path} is no text", expected="Lua in UTF-8", found=f"byte {error.start}") from None
    if len(files) > LUA_FILES_MAX:
        refuse(f"--file is given at most {LUA_FILES_MAX} times")
    read: dict[str, bytes] = {}
    for said in files:
        own, _, where = said.rpartition("=")
        file = Path(where)
        called = own or file.name
        if called in read:
            refuse(f"two files would be called {called}: name them, as --file prices.json=data/prices-2026.json")
        read[called] = _read(file, LUA_FILE_BYTES_MAX)
    return SubmittedFile(name or name_of(path), source, read)


def name_of(path: Path) -> str:
    """What the procedure of a file is called: `customer_support.tactus.lua` is customer_support."""
    name = path.name
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise SettingInvalid(
            f"{path} cannot be read", expected="a file", found=error.strerror, remedy="Check the path."
        ) from None
    if len(data) > bytes_max:
        raise InputTooLarge(f"{path} is too large", expected=f"at most {bytes_max} bytes")
    return data


async def submit_program(
    client: GatewayClient, path: Path, program: SubmittedFile, version: str | None
) -> dict[str, Any]:
    """The program as the gateway has it now. What lint finds goes to stderr; a refusal shows the line that it names."""
    body: dict[str, Any] = {"name": program.name, "language": "lua", "source": program.source}
    if version is not None:
        body["version"] = version
    if program.files:
        body["files"] = await _files(client, program.files)
    try:
        submitted = (await client.post("/v1/procedures", body)).document
    except ProcedureSourceInvalid as refused:
        _show_line(path, program.source, refused.line)
        raise
    is_new = "submitted" if submitted["is_new"] else "is there already"
    notes.print(
        printable(f"{submitted['name']} {submitted['version']} {is_new}: program {submitted['program_digest'][:16]}…"),
        markup=False,
    )
    _show_findings(path, program.source, submitted.get("findings") or [])
    return submitted


async def _files(client: GatewayClient, files: dict[str, bytes]) -> dict[str, Any]:
    """In the body where they are small; else stored as blobs before."""
    is_inline = sum(map(len, files.values())) <= _INLINE_BYTES_MAX
    told: dict[str, Any] = {}
    for name, data in files.items():
        if is_inline:
            told[name] = {"base64": b64encode(data).decode()}
        else:
            sha256 = hashlib.sha256(data).hexdigest()
            await client.put_blob(sha256, data)
            told[name] = {"sha256": sha256}
    return told


def _show_findings(path: Path, source: str, findings: list[dict[str, Any]]) -> None:
    if not findings:
        return
    notes.print(
        f"{counted(len(findings), 'finding')} (`tga lint {printable(str(path))}` shows them again):", markup=False
    )
    for finding in findings:
        notes.print(printable(f"{finding['code']} {path}:{finding['line']}: {finding['what']}"), markup=False)
        notes.print(printable(f"       instead: {finding['fix']}"), markup=False)


def _show_line(path: Path, source: str, line: int | None) -> None:
    """The line that is to blame, with its neighbours."""
    lines = source.splitlines()
    if line is None or not 1 <= line <= len(lines):
        return
    for number in range(max(1, line - 1), min(len(lines), line + 1) + 1):
        sign = ">" if number == line else " "
        notes.print(printable(f"{sign} {path}:{number}: {lines[number - 1]}"), markup=False)
