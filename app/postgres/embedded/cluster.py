"""What must be right about a cluster before a server works in it: whose its places are, and which version made it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from secrets import token_hex

from app.core.errors import EmbeddedPostgresFailed
from app.postgres.embedded.binaries import Account, make_directory


def verify_ours(path: Path) -> None:
    """As root we write and change owners in there: no other user may put something in its place."""
    facts = path.lstat()
    writable_by_others = not stat.S_ISLNK(facts.st_mode) and facts.st_mode & 0o022
    if facts.st_uid != os.geteuid() or writable_by_others:
        raise EmbeddedPostgresFailed(
            f"{path} is not safe to keep a cluster in",
            expected=f"owned by uid {os.geteuid()} and writable by no other",
            found=f"uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}",
            remedy="Run as the user who owns it, or choose another home directory.",
        )


def verify_major(data_dir: Path, version: str) -> None:
    try:
        major = (data_dir / "PG_VERSION").read_text("ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise EmbeddedPostgresFailed(
            f"{data_dir} exists and is not a cluster",
            expected="a file PG_VERSION in it",
            found="none",
            remedy="Nothing was changed. Restore it from a backup, or move it away to begin anew.",
        ) from error
    if not version.startswith(major) or version[len(major) :][:1].isdecimal():
        raise EmbeddedPostgresFailed(
            f"{data_dir} was made by another major version of PostgreSQL",
            expected=f"programs of version {major}",
            found=f"version {version}",
            remedy=f"Nothing was changed. Dump it with PostgreSQL {major} (pg_dumpall), move home away, "
            f"and restore the dump with {version}; or go on with the programs of version {major}.",
        )


def link_to_new_place(entry: Path, shared: Path, mode: int, *, name: str) -> None:
    """Make a directory in `shared` that never was, and `entry` a link to it, unless another process is faster.

    Never one that is there already: a home that was removed and made anew must not meet its former database, in which
    former keys are valid.
    """
    place = shared / f"{name}-{token_hex(8)}"
    make_directory(place, mode)
    verify_ours(shared)
    try:
        entry.symlink_to(place)
    except FileExistsError:
        place.rmdir()


def remove_place(entry: Path) -> None:
    """Remove what `entry` is or links to, and then `entry` itself."""
    shutil.rmtree(os.path.realpath(entry))
    if entry.is_symlink():
        entry.unlink()


def ensure_socket_dir(path: Path, account: Account | None) -> None:
    server_uid = os.geteuid() if account is None else account.uid
    make_directory(path, 0o700, account)
    facts = path.lstat()
    found = f"uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}"
    if not stat.S_ISDIR(facts.st_mode):
        found = "something else than a directory"
    elif facts.st_uid == server_uid and not facts.st_mode & 0o077:
        return
    raise EmbeddedPostgresFailed(
        f"{path} is not private, and whoever comes through the socket in it is trusted",
        expected=f"a directory of uid {server_uid} with mode 0700",
        found=found,
        remedy="Find out who made it, remove it, and start again.",
    )
