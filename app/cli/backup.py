"""`tga db backup` and `tga db restore`: with the programs that fit the server, and verified."""

from __future__ import annotations

import dataclasses
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from app.cli.showing import confirmed, notes, output
from app.cli.verify import verify
from app.core.errors import BackupFailed, LogForked
from app.domain.log.heads import SignedHead
from app.keys.log_signer import LogSigner, load_memory
from app.postgres import backup
from app.postgres.database import EMBEDDED_DATABASE, Database, open_database
from app.postgres.guards import find_problems
from app.postgres.migrate import load_status, migrate
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.settings import Settings

_SCRATCH: Final = "tga_roles"


async def back_up(settings: Settings, file: Path) -> bool:
    """True when the file is whole: all of it was read again."""
    async with open_database(settings.home, settings.database_url, make=False) as database:
        if not (await load_status(database.admin_url)).applied:
            raise BackupFailed("the database holds no ledger", remedy="There is nothing to back up yet.")
        await backup.dump(database.admin_url, file)
        head = await _newest_head(database)
    size, digest = _facts_of(file)
    output.print(f"Wrote {file}, {size:,} bytes, and read all of it again.", markup=False)
    output.print(f"sha256 {digest}")
    if head is not None:
        output.print(f"The newest signed head is of {head.head.size:,} leaves ({head.head.origin}).", markup=False)
    notes.print(
        f"The keys folder {settings.keys} is not in it: back it up apart from this, all but log.head, and tga.toml.",
        markup=False,
    )
    return True


def _facts_of(file: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as written:
        while chunk := written.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


async def restore(settings: Settings, file: Path, *, yes: bool) -> bool:
    """True when the database is the one of the backup, fit and verified. What was there before is kept under another
    name (embedded), or must not be there (a server of one's own)."""
    await backup.verify_readable(file)
    memory = load_memory(settings.keys)
    if settings.database_url is not None:
        return await _restore_named(settings, settings.database_url, file, memory, yes=yes)
    async with open_database(settings.home, None) as database:
        return await _restore_embedded(settings, database, file, memory, yes=yes)


async def _restore_named(settings: Settings, url: str, file: Path, memory: SignedHead | None, *, yes: bool) -> bool:
    database = Database(url, url, is_embedded=False)
    if await backup.has_ledger(url):
        raise BackupFailed(
            f"there is a ledger in {database.where} already",
            expected="an empty database",
            remedy="Create another (CREATE DATABASE), name it in TGA_DATABASE_URL, and restore into that.",
        )
    if not confirmed(f"Restore {file} into {database.where}?", yes=yes):
        notes.print("Nothing was restored.")
        return False
    if not await backup.has_roles(url):
        raise BackupFailed(
            "the server lacks the roles tga_owner and tga_gateway",
            remedy="As an administrator: CREATE ROLE tga_owner NOLOGIN; CREATE ROLE tga_gateway LOGIN.",
        )
    await backup.restore(url, file)
    if not await _is_sound(settings, url):
        raise BackupFailed(f"what was restored into {database.where} is not sound", remedy="Drop it: do not use it.")
    await _tell(database, memory)
    return True


async def _restore_embedded(
    settings: Settings, database: Database, file: Path, memory: SignedHead | None, *, yes: bool
) -> bool:
    def url_of(name: str) -> str:
        return urlsplit(database.admin_url)._replace(path=f"/{name}").geturl()

    root, now = url_of("postgres"), datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    if users := await backup.count_users(root, EMBEDDED_DATABASE):
        raise BackupFailed(
            f"{users} sessions use the database in {database.place}",
            remedy="Stop the gateway and other commands first.",
        )
    former = await backup.has_ledger(database.admin_url)
    if former:
        await _verify_memory(database, memory, settings.keys)
    kept = f"tga_replaced_{now}"
    question = f"Restore {file} into {database.place}? " + (f"What is there is kept as {kept}." if former else "")
    if not confirmed(question.strip(), yes=yes):
        notes.print("Nothing was restored.")
        return False
    if not await backup.has_roles(root):  # a new cluster: migrating anything makes them
        await backup.execute(root, f"CREATE DATABASE {_SCRATCH}")
        await migrate(url_of(_SCRATCH))
        await backup.execute(root, f"DROP DATABASE {_SCRATCH}")
    restored = f"tga_restored_{now}"
    await backup.execute(root, f"CREATE DATABASE {restored}")
    try:
        await backup.restore(url_of(restored), file)
        if not await _is_sound(settings, url_of(restored)):
            raise BackupFailed(
                "what is in the backup is not sound", remedy="Nothing was replaced. Try an older backup."
            )
        if former:
            await backup.execute(root, f"ALTER DATABASE {EMBEDDED_DATABASE} RENAME TO {kept}")
        else:
            await backup.execute(root, f"DROP DATABASE {EMBEDDED_DATABASE}")
        await backup.execute(root, f"ALTER DATABASE {restored} RENAME TO {EMBEDDED_DATABASE}")
    except BaseException:
        await backup.execute(root, f"DROP DATABASE IF EXISTS {restored}")
        raise
    if former:
        output.print(f"The database that was there is kept as {kept}.")
    await _tell(database, memory)
    return True


async def _is_sound(settings: Settings, url: str) -> bool:
    """Fit, as every start demands it; and every digest, link and head of it, by itself: what the signer remembers of
    later entries is told apart from that. A backup of an earlier version is migrated first."""
    await migrate(url)
    refusing = [problem for problem in await find_problems(url) if problem.refuses]
    for problem in refusing:
        output.print(f"{problem.what}: expected {problem.expected}, found {problem.found}", markup=False)
        output.print(f"    {problem.remedy}", markup=False)
    there = dataclasses.replace(settings, database_url=url)
    return await verify(there, None, as_json=False, with_memory=False) and not refusing


async def _verify_memory(database: Database, memory: SignedHead | None, keys: Path) -> None:
    """The signer's memory is never behind what its own key signed in the database that is about to go: if it is, an old
    `log.head` was put back, and nothing would show any more that later entries were signed."""
    newest = await _newest_head(database)
    if newest is None or not (keys / "log.key").is_file():
        return
    signer = LogSigner.open(keys)
    if not signer.has_signed(newest):
        return
    is_other = memory is not None and memory.head.origin != newest.head.origin
    is_behind = memory is None or memory.head.size < newest.head.size
    if signer.is_later_epoch(newest, after=memory) if memory is not None and is_other else is_behind:
        raise LogForked(
            f"log.head in {keys} is older than the database that would be replaced",
            expected=f"{newest.head.size} leaves of {newest.head.origin}",
            found="none" if memory is None else f"{memory.head.size} leaves of {memory.head.origin}",
            remedy="An old log.head was put back. Put the newest one there, or a head of that size that anyone kept.",
        )


async def _newest_head(database: Database) -> SignedHead | None:
    async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
        return await PostgresTree(sessions).latest_head()


async def _tell(database: Database, memory: SignedHead | None) -> None:
    head = await _newest_head(database)
    size = 0 if head is None else head.head.size
    output.print(f"Restored and verified: {database.where}, {size:,} leaves under signed heads.", markup=False)
    if memory is not None and (memory.head.size > size or (head and head.head.origin != memory.head.origin)):
        output.print(
            f"[bold yellow]![/] The log was signed up to {memory.head.size:,} leaves. What this backup lacks of them "
            "was acknowledged to callers, and their keys are free again: tell them before a gateway starts."
        )
        output.print("If there is no newer backup, say so on the record: tga log new-epoch -r WHY", markup=False)
    elif memory is None and head is not None:
        output.print(
            "[bold yellow]![/] There is no log.head in the keys folder, so nothing here knows what was signed after "
            "this backup. Compare with a head that someone kept: tga verify --all --head FILE --key PUB"
        )
