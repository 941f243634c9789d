"""A backup is what pg_dump writes, and nothing of ours: any PostgreSQL restores it. Here are the right programs for it.

The keys folder is in no backup of the database, least of all `log.head`, which keeps the log from being signed twice.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import asyncpg

from app.core.errors import BackupFailed
from app.postgres.embedded.binaries import find_binaries
from app.postgres.refusals import unavailable
from app.postgres.sessions import LOST, connect

Program = Literal["pg_dump", "pg_restore"]
_DEBIAN: Final = Path("/usr/lib/postgresql")
_SAID_CHARS_MAX: Final = 1_000
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)")
_USERS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"


async def dump(url: str, file: Path) -> None:
    """Write the database to a file that was not there, readable by its owner alone; whole, or not at all."""
    if os.path.lexists(file):  # noqa: ASYNC240
        raise BackupFailed(f"{file} is there already", remedy="Name another file: a backup never replaces one.")
    program = find_program("pg_dump", await _server_major(url))
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        await _run(program, "--format=custom", f"--file={unfinished}", url=url)
        await verify_readable(unfinished)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.rename(unfinished, file)
    except OSError as error:
        raise BackupFailed(f"{file} cannot be written", found=error.strerror) from None
    finally:
        unfinished.unlink(missing_ok=True)


async def verify_readable(file: Path) -> None:
    """Read all of it, as a restore would, into nothing: a file that was cut off is found here."""
    if not file.is_file():  # noqa: ASYNC240
        raise BackupFailed(f"there is no file {file}")
    newest = max(_programs("pg_restore"), key=lambda known: known[1])[0]  # reads what every older one has written
    await _run(newest, f"--file={os.devnull}", str(file))


async def restore(url: str, file: Path) -> None:
    """Into an empty database, all of it or an error; the roles must be there."""
    program = find_program("pg_restore", await _server_major(url))
    await _run(program, "--exit-on-error", "--single-transaction", str(file), url=url)


async def count_users(url: str, database: str) -> int:
    """Sessions in this database, of gateways or of anyone else."""
    return int(await _value(url, _USERS, database))


async def has_ledger(url: str) -> bool:
    return await _value(url, "SELECT to_regnamespace('tga')::text") is not None


async def has_roles(url: str) -> bool:
    return int(await _value(url, "SELECT count(*) FROM pg_roles WHERE rolname IN ('tga_owner', 'tga_gateway')")) == 2


async def execute(url: str, statement: str) -> None:
    await _value(url, statement)


def find_program(name: Program, server_major: int) -> Path:
    """One that is at least as new as the server: of the same version if there is one, else the next newer. The system's
    own come before the bundled one, which speaks no TLS."""
    known = _programs(name)
    fit = sorted(((major, place) for place, (_, major) in enumerate(known) if major >= server_major))
    if not fit:
        raise BackupFailed(
            f"no {name} is new enough for this server",
            expected=f"version {server_major} or newer",
            found=", ".join(f"{path} ({major})" for path, major in known) or "none",
            remedy=f"Install the client programs of PostgreSQL {server_major} (apt install postgresql-client).",
        )
    return known[fit[0][1]][0]


def _programs(name: Program) -> list[tuple[Path, int]]:
    """Each with its major version."""
    on_path = shutil.which(name)
    found = [*([Path(on_path)] if on_path else []), *(path / "bin" / name for path in _DEBIAN.glob("*"))]
    return [(path, _major_of(path)) for path in (*found, find_binaries() / name) if path.is_file()]


def _major_of(program: Path) -> int:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    found = _VERSION.search(said)
    return int(found[1]) if found else -1


async def _run(program: Path, *arguments: str, url: str | None = None) -> None:
    environment = {"LC_ALL": "C", "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": os.environ.get("HOME", "/")}
    connection: list[str] = []
    if url is not None:  # who lists processes sees arguments, and no environment
        parts = urlsplit(url)
        if parts.password is not None:
            environment["PGPASSWORD"] = parts.password
            shown = parts.netloc.replace(f":{parts.password}@", "@", 1)
            url = parts._replace(netloc=shown).geturl()
        connection = ["--no-password", f"--dbname={url}"]
    process = await asyncio.create_subprocess_exec(
        program,
        *connection,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        said, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        raise BackupFailed(
            f"{program.name} ended with status {process.returncode}",
            found=said.decode("utf-8", "replace").strip()[-_SAID_CHARS_MAX:],
        )


async def _server_major(url: str) -> int:
    return int(await _value(url, "SELECT current_setting('server_version_num')::integer")) // 10_000


async def _value(url: str, statement: str, *arguments: object) -> Any:
    session = await connect(url)
    try:
        return await session.fetchval(statement, *arguments)
    except (*LOST, asyncpg.PostgresError) as error:
        raise unavailable(error, url) from error
    finally:
        await session.close()
