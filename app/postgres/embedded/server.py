"""The bundled PostgreSQL: made, started, shared by processes, taken over after crashes, stopped by the last.

The protocol is four names under `home/postgres`. The locks are flocks, which end with their processes:

    start.lock   exclusive, while one process starts or stops
    users.lock   shared, by each user for as long as it uses the server
    server.lock  exclusive, inherited by the server and all its children: free means that none of them is left
    data         a directory that is complete if it is there: initdb works elsewhere and the result is renamed

Synchronous: call it before the event loop, or from a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from app.core.errors import EmbeddedPostgresFailed
from app.postgres.embedded.binaries import (
    Account,
    can_enter,
    find_binaries,
    make_directory,
    reachable_binaries,
    run_as,
    unprivileged_account,
)
from app.postgres.embedded.cluster import (
    ensure_socket_dir,
    link_to_new_place,
    remove_place,
    verify_major,
    verify_ours,
)
from app.postgres.embedded.postmaster import (
    answers,
    clear_way,
    end_orphans,
    recorded_pid,
    standing_of,
    tail_of,
    try_exclusive,
)

__all__ = ["EmbeddedPostgres", "find_binaries"]

# For root, whose home other accounts usually cannot enter.
SHARED_STATE = Path("/var/lib/tga")
# Not tempfile.gettempdir(): two processes with different TMPDIR must meet at the same socket.
SOCKETS = Path("/tmp")  # noqa: S108 - a directory in it is used only if its owner and mode are right

LOG_BYTES_MAX = 16 * 1024 * 1024
ORPHANS_LEAVE_S = 3.0
SOCKET_PATH_BYTES_MAX = 107
_PORT = 5432
_SOCKET_NAME = f".s.PGSQL.{_PORT}"
_POLL_S = 0.02
# What PostgreSQL says when remains of the previous server are in its way; these pass, or are cleared.
_IN_THE_WAY = (b"already exists", b"is still in use", b"lock file", b"could not create shared memory segment")


class EmbeddedPostgres:
    """One cluster in `home`, reachable through a unix socket in a private directory and in no other way.

    Between start() and stop() the server stays, also when other processes stop using it. It outlives a
    process that dies without stop(), until the next user stops. After a crash of the server call start()
    again, on the same object or another: `ServerKeeper` does. Whoever can act as the server's account, or as
    root, can do anything to it.
    """

    def __init__(
        self, home: Path, *, bin_dir: Path | None = None, timeout_s: float = 60.0, connections_max: int = 100
    ) -> None:
        if any(character in str(home) for character in "\n\r\0"):
            raise EmbeddedPostgresFailed(
                f"{str(home)!r} cannot be a home: PostgreSQL's lock files keep paths as lines",
                expected="a path without line breaks and NUL",
                remedy="Choose another home directory.",
            )
        self._home = Path(os.path.realpath(home))
        self._bin_dir = bin_dir
        self._timeout_s = timeout_s
        self._connections_max = connections_max  # of the server that this one starts
        self._users_descriptor: int | None = None

    @property
    def data_dir(self) -> Path:
        return self._cluster / "data"

    @property
    def place(self) -> Path:
        """Where the cluster is, or will be: `home/postgres`, or what that links to."""
        return self._cluster

    @property
    def is_made(self) -> bool:
        """Whether there is a cluster; looking makes none."""
        return self.data_dir.is_dir()

    @property
    def log_file(self) -> Path:
        return self._cluster / "server.log"

    @property
    def socket_dir(self) -> Path:
        """In the cluster's directory, unless clients could not name it there."""
        inside = self._cluster / "socket"
        name = os.fsencode(inside / _SOCKET_NAME)
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            clients_can_name_it = False  # a URL is UTF-8
        else:
            clients_can_name_it = len(name) <= SOCKET_PATH_BYTES_MAX and b"," not in name  # a list of hosts
        if clients_can_name_it:
            return inside
        return SOCKETS / f"tga-{self._server_uid}-{_short_hash(self._cluster)}"

    def url(self, user: str = "postgres", database: str = "postgres") -> str:
        # The port is named because a client would otherwise take PGPORT.
        host = quote(os.fsencode(self.socket_dir), safe="")
        return f"postgresql://{quote(user, safe='')}@/{quote(database, safe='')}?host={host}&port={_PORT}"

    def postmaster_pid(self) -> int | None:
        """The living server's process id; None when there is none, whatever postmaster.pid says."""
        with self._failures_explained("look for"):
            return self._living_pid()

    def _living_pid(self) -> int | None:
        pid = recorded_pid(self.data_dir / "postmaster.pid")
        return (
            pid if pid is not None and standing_of(pid, self.data_dir, self._account) in ("ours", "unknown") else None
        )

    def start(self) -> None:
        """Return once the server answers, having made, started, or joined it. Repeating it is harmless.

        On failure nothing is in use; a server that is still recovering is left to go on, for a later start.
        """
        with self._failures_explained("start"):
            deadline = time.monotonic() + self._timeout_s
            found = find_binaries(self._bin_dir)
            self._settle()
            account = self._account
            bin_dir, version = reachable_binaries(found, account, copies=SHARED_STATE)
            with self._alone(deadline):
                acquired = self._users_descriptor is None
                if self._users_descriptor is None:
                    self._users_descriptor = self._open_lock("users.lock")
                    fcntl.flock(self._users_descriptor, fcntl.LOCK_SH)
                try:
                    self._ensure_cluster(bin_dir, version, account, deadline)
                    ensure_socket_dir(self.socket_dir, account)
                    self._ensure_running(bin_dir, account, deadline)
                except BaseException:
                    if acquired:
                        self._leave()
                    raise

    def stop(self) -> None:
        """Stop using the server, and stop it if no other process uses it: a clean shutdown, waited for."""
        if self._users_descriptor is None:
            return
        with self._failures_explained("stop"):
            deadline = time.monotonic() + self._timeout_s
            try:
                with self._alone(deadline):
                    # Ours becomes exclusive only if no other process holds one; start.lock keeps new ones out.
                    if try_exclusive(self._users_descriptor):
                        self._shut_down(deadline)
            finally:
                self._leave()

    def drop(self) -> None:
        """Remove the cluster and all that is in it, for ever; EmbeddedPostgresFailed while anyone uses it.

        After a crash in the middle there is no cluster, and the next start sweeps the remains away.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._failures_explained("drop"), self._alone(deadline):
            users = self._open_lock("users.lock")
            try:
                if is_free := try_exclusive(users):
                    self._shut_down(deadline)
                    os.rename(self.data_dir, self._cluster / "initdb-dropped")
                    remove_place(self._home / "postgres")
            finally:
                os.close(users)
        if not is_free:
            raise EmbeddedPostgresFailed(f"the database in {self._cluster} is in use", remedy="Stop the gateway first.")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _cluster(self) -> Path:
        return Path(os.path.realpath(self._home / "postgres"))

    @property
    def _account(self) -> Account | None:
        """Once there is a cluster its owner, so that a `postgres` user added later does not lock us out."""
        chosen = unprivileged_account()
        if chosen is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                owner = self.data_dir.stat()
                return Account(owner.st_uid, owner.st_gid) if owner.st_uid != 0 else chosen
        return chosen

    @property
    def _lock_files(self) -> tuple[Path, Path]:
        return self.data_dir / "postmaster.pid", self.socket_dir / f"{_SOCKET_NAME}.lock"

    @property
    def _server_uid(self) -> int:
        account = self._account
        return os.geteuid() if account is None else account.uid

    def _leave(self) -> None:
        if self._users_descriptor is not None:
            os.close(self._users_descriptor)
            self._users_descriptor = None

    def _settle(self) -> None:
        """Decide, once and for ever, where the cluster lives: `home/postgres` is a directory or a link.

        Recorded in home itself: a later change of permissions must not turn into a new, empty ledger.
        """
        account = self._account
        entry = self._home / "postgres"
        mode = 0o700 if account is None else 0o711
        if not os.path.lexists(entry):
            make_directory(self._home, mode)
            if can_enter(self._home, account):
                make_directory(entry, mode)
            else:
                link_to_new_place(entry, SHARED_STATE, mode, name=_short_hash(self._home))
        verify_ours(entry)
        verify_ours(self._cluster)
        if not can_enter(self._cluster, self._account):
            raise EmbeddedPostgresFailed(
                f"the account that PostgreSQL runs as cannot enter {self._cluster}, where the cluster is",
                expected="search permission on it and on every directory above it",
                found=f"none for uid {self._server_uid}",
                remedy="Give it back (chmod o+x), or move the cluster and leave a link in its place.",
            )

    def _ensure_cluster(self, bin_dir: Path, version: str, account: Account | None, deadline: float) -> None:
        if self.data_dir.exists():
            verify_major(self.data_dir, version)
            return
        for remains in self._cluster.glob("initdb-*"):
            shutil.rmtree(remains, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix="initdb-", dir=self._cluster))
        try:
            if account is not None:
                os.chown(staging, account.uid, account.gid)
            command: list[str | Path] = [bin_dir / "initdb", "-D", staging, "-U", "postgres", "-E", "UTF8"]
            command.append("--locale=C")
            command += ["--auth-local=trust", "--auth-host=reject", "--data-checksums", "--no-instructions"]
            with self._log() as log:
                timeout_s = max(1.0, deadline - time.monotonic())
                status = run_as(account, command, output=log, timeout_s=timeout_s).returncode
            if status != 0:
                raise EmbeddedPostgresFailed("initdb could not make a cluster", expected="exit status 0", found=status)
            # From here on the cluster counts. A crash before leaves only what the next start sweeps away.
            os.rename(staging, self.data_dir)
            descriptor = os.open(self._cluster, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _ensure_running(self, bin_dir: Path, account: Account | None, deadline: float) -> None:
        log_bytes_before: int | None = None
        pause_s, orphans = 0.01, self._orphans()
        while not answers(self.socket_dir / _SOCKET_NAME, deadline=deadline):
            with self._server_lock() as lock:
                # Not free: a server starts, recovers or ends, or children of a killed one are still leaving.
                if lock is None and log_bytes_before is None:
                    next(orphans)
                elif lock is not None:
                    if log_bytes_before is not None:
                        self._verify_retryable(log_bytes_before)
                    if clear_way(self._lock_files, self.data_dir, self._account):
                        log_bytes_before = self._launch(bin_dir, account, lock)
            if time.monotonic() > deadline:
                pid = self._living_pid()
                raise EmbeddedPostgresFailed(
                    f"no answer from the server at {self.socket_dir} within {self._timeout_s:g} s",
                    expected="a server that accepts connections",
                    found="remains of one in its way" if pid is None else f"process {pid}, which does not",
                    remedy=f"End what still works in {self.data_dir}, then start again."
                    if pid is None
                    else f"If the log shows recovery, start again to go on waiting; if {pid} is a server that "
                    f"hangs, kill -INT {pid}; if it is no server, remove postmaster.pid in {self.data_dir}.",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)  # each refused attempt is a line in the log

    def _verify_retryable(self, log_bytes_before: int) -> None:
        with self.log_file.open("rb") as log:
            log.seek(log_bytes_before)
            said = log.read(65536)
        if not any(sign in said for sign in _IN_THE_WAY):
            raise EmbeddedPostgresFailed(
                "the server ended while starting", expected="a server that accepts connections"
            )

    def _launch(self, bin_dir: Path, account: Account | None, lock: int) -> int:
        """Start the server detached from this process; returns how long the log was before."""
        if self.log_file.exists() and self.log_file.stat().st_size > LOG_BYTES_MAX:
            os.replace(self.log_file, self.log_file.with_name("server.log.1"))
        # The setting is a list, in which a quoted name may hold anything.
        sockets = '"' + str(self.socket_dir).replace('"', '""') + '"'
        settings = [
            "listen_addresses=",
            f"unix_socket_directories={sockets}",
            "unix_socket_permissions=0700",
            f"port={_PORT}",
            f"max_connections={self._connections_max}",
        ]
        command: list[str | Path] = [bin_dir / "postgres", "-D", self.data_dir]
        for setting in settings:
            command += ["-c", setting]
        with self._log() as log:
            log_bytes_before = os.fstat(log).st_size
            # Through a shell that leaves it behind, because a child of ours would stay a zombie of ours. Not
            # by pg_ctl, which pastes paths into a shell command between quotes that they may hold themselves.
            run_as(account, ["/bin/sh", "-c", '"$@" &', "sh", *command], output=log, pass_fds=(lock,))
        return log_bytes_before

    def _orphans(self) -> Iterator[None]:
        """To be asked while server.lock is not free: children of a postmaster that is gone are given a while to leave,
        then told to, then ended."""
        since: float | None = None
        signals = ["QUIT", "KILL"]
        while True:
            if self._living_pid() is not None:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() > since + ORPHANS_LEAVE_S and signals:
                end_orphans(self.data_dir, self._account, with_signal=signals.pop(0))
                since = None
            yield

    def _shut_down(self, deadline: float) -> None:
        signalled: int | None = None
        patience, orphans = (time.monotonic() + deadline) / 2, self._orphans()
        while True:
            pid = self._living_pid()
            with self._server_lock() as lock:
                if lock is not None and (pid is None or standing_of(pid, self.data_dir, self._account) != "ours"):
                    break
                if lock is None:
                    next(orphans)
            if pid is not None and pid != signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)  # PostgreSQL's fast shutdown
                signalled = pid
            elif pid is not None and time.monotonic() > patience:
                # PostgreSQL 18 told to stop while it recovers from a crash never ends. An immediate shutdown loses
                # nothing: the next start recovers.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGQUIT)
                patience = deadline
            if time.monotonic() > deadline:
                raise EmbeddedPostgresFailed(
                    f"the server did not stop within {self._timeout_s:g} s",
                    expected="a clean shutdown",
                    found=f"process {pid} still there" if pid else "children of it still there",
                    remedy="Nothing is lost. It goes on stopping; end it with kill -QUIT if it never does.",
                )
            time.sleep(_POLL_S)
        if self.socket_dir.parent == SOCKETS:
            with contextlib.suppress(OSError):
                self.socket_dir.rmdir()

    def _open_lock(self, name: str) -> int:
        return os.open(self._cluster / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        descriptor = self._open_lock("start.lock")
        try:
            while not try_exclusive(descriptor):
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresFailed(
                        f"another process keeps starting or stopping this server, for {self._timeout_s:g} s",
                        expected=f"the lock on {self._cluster / 'start.lock'}",
                        found="it held by another process",
                        remedy="Find it (fuser or lsof on that file), end it if it hangs, and try again.",
                    )
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _server_lock(self) -> Iterator[int | None]:
        descriptor = self._open_lock("server.lock")
        try:
            yield descriptor if try_exclusive(descriptor) else None
        finally:
            os.close(descriptor)  # a server that inherited it keeps it

    @contextlib.contextmanager
    def _log(self) -> Iterator[int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.log_file, flags, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _failures_explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except EmbeddedPostgresFailed as error:
            error.next_step += f"\n{tail_of(self.log_file)}"
            raise
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedPostgresFailed(
                f"could not {verb} the bundled PostgreSQL of {self._home}",
                found=error,
                remedy=f"{EmbeddedPostgresFailed.remedy}\n{tail_of(self.log_file)}",
            ) from error


def _short_hash(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
