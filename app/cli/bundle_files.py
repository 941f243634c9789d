"""A bundle's folder, read in bounded pieces; and what is remembered of its streams, in a temporary database on disk."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from app.cli.installation import SCHEMAS
from app.core.canonical import canonical_bytes, parse_object
from app.core.chain import Head
from app.core.errors import BundleInvalid
from app.core.limits import BLOB_PIECE_BYTES, BUNDLE_LINE_BYTES_MAX, BUNDLE_STREAMS_IN_MEMORY_MAX
from app.domain.ledger.checks import (
    EntryPlace,
    Erased,
    Kinds,
    Origin,
    Reference,
    ReferredBlob,
    Standing,
    WholeStream,
    kind_name,
)
from app.domain.log.bundle import MANIFEST
from app.domain.log.bundled_blobs import missing_from_bundle
from app.domain.log.streams import NotRemembered

_WHOLE_TOGETHER: Final = 4_096
_BLOCK_BYTES: Final = 262_144


class FolderFiles:
    """The BundleFiles of a folder. `seen` is told how many bytes were read, for a progress bar."""

    def __init__(self, folder: Path, *, seen: Callable[[int], None] = lambda _: None) -> None:
        self._folder = folder
        self._seen = seen

    def read(self, name: str, *, bytes_max: int) -> bytes:
        try:
            with self._file(name).open("rb") as file:
                raw = file.read(bytes_max + 1)
        except OSError as error:
            raise self._unreadable(name, error) from None
        if len(raw) > bytes_max:
            raise BundleInvalid(f"{name} is too large", expected=f"at most {bytes_max} bytes")
        return raw

    def lines(self, name: str) -> Iterator[bytes]:
        try:
            with self._file(name).open("rb", buffering=_BLOCK_BYTES) as file:
                unseen = 0
                for line in iter(partial(file.readline, BUNDLE_LINE_BYTES_MAX + 1), b""):
                    yield line
                    unseen += len(line)
                    if unseen >= _BLOCK_BYTES:
                        self._seen(unseen)
                        unseen = 0
                self._seen(unseen)
        except OSError as error:
            raise self._unreadable(name, error) from None

    def has(self, name: str, text: bytes) -> bool:
        """Whether the text stands anywhere in the file."""
        try:
            with self._file(name).open("rb", buffering=0) as file:
                rest = b""
                while block := file.read(_BLOCK_BYTES):
                    if text in block or text in rest + block[: len(text)]:
                        return True
                    rest = block[-len(text) :]
        except OSError as error:
            raise self._unreadable(name, error) from None
        return False

    def pieces(self, name: str, *, bytes_max: int) -> Iterator[bytes]:
        try:
            with self._file(name).open("rb") as file:
                while bytes_max > 0 and (piece := file.read(min(BLOB_PIECE_BYTES, bytes_max))):
                    self._seen(len(piece))
                    bytes_max -= len(piece)
                    yield piece
        except FileNotFoundError:
            raise missing_from_bundle(name.rpartition("/")[2]) from None
        except OSError as error:
            raise self._unreadable(name, error) from None

    def _file(self, name: str) -> Path:
        path = self._folder / name
        if path.exists() and not path.is_file():  # a pipe would never end
            raise BundleInvalid(f"{name} is no file")
        return path

    def _unreadable(self, name: str, error: OSError) -> BundleInvalid:
        if name == MANIFEST and isinstance(error, FileNotFoundError):
            return BundleInvalid("the bundle has no manifest: its export did not finish", expected=MANIFEST)
        return BundleInvalid(f"{name} cannot be read", found=error.strerror)


class BlobList:
    """Blobs to which entries refer, each once for every tenant and size that is said of it, on disk."""

    def __init__(self, disk: sqlite3.Connection | None = None, *, is_new: bool = True) -> None:
        self._disk = disk or sqlite3.connect("", isolation_level=None)
        if not is_new:
            return
        self._disk.executescript(
            """
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192;
            CREATE TABLE blobs (tenant TEXT, sha256 TEXT, size INTEGER, sealed INTEGER, stream TEXT, number INTEGER,
                                PRIMARY KEY (sha256, size, tenant)) WITHOUT ROWID;
            """
        )

    def add(self, place: EntryPlace, blob: ReferredBlob, *, tenant: str = "") -> None:
        self._disk.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?, ?, ?)", (tenant, *blob, *place))

    def all(self) -> Iterator[tuple[EntryPlace, ReferredBlob]]:
        for _, place, blob in self.by_tenant():
            yield place, blob

    def by_tenant(self) -> Iterator[tuple[str, EntryPlace, ReferredBlob]]:
        for tenant, sha256, size, sealed, stream, number in self._disk.execute("SELECT * FROM blobs"):
            yield tenant, EntryPlace(stream, number), ReferredBlob(sha256, size, bool(sealed))

    def count(self) -> int:
        return int(self._disk.execute("SELECT count(*) FROM blobs").fetchone()[0])

    def close(self) -> None:
        self._disk.close()


class DiskMemory:
    """The StreamMemory on disk: a temporary database that vanishes with it, in front of it what was used last."""

    def __init__(
        self,
        kinds: Kinds,
        *,
        streams_max: int = BUNDLE_STREAMS_IN_MEMORY_MAX,
        path: Path | None = None,
        is_new: bool = True,
    ) -> None:
        """`path`: of a file that stays when this is closed; another process opens it (not `is_new`) after `leave`."""
        self._kinds = kinds
        self._recent: OrderedDict[str, Standing] = OrderedDict()
        self._streams_max = streams_max
        self._has_origins = False  # most bundles have none
        self._has_spilled = self._has_whole = not is_new
        self._whole: list[tuple[object, ...]] = []  # that are not on disk yet, and the claims of those
        self._whole_claims: list[tuple[str, str]] = []
        # An empty name: a private file, removed when it is closed; little of it is kept in memory.
        self._disk = sqlite3.connect("" if path is None else path, isolation_level=None)
        self._blobs = BlobList(self._disk, is_new=is_new)
        if not is_new:
            return
        self._disk.executescript(
            """
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192;
            CREATE TABLE streams (stream TEXT PRIMARY KEY, standing BLOB NOT NULL) WITHOUT ROWID;
            CREATE TABLE whole (stream TEXT PRIMARY KEY, number INTEGER, digest TEXT, state TEXT, artifact_digest TEXT)
                WITHOUT ROWID;
            CREATE TABLE claims (key TEXT PRIMARY KEY, stream TEXT NOT NULL) WITHOUT ROWID;
            CREATE TABLE erasures (stream, last_number, last_digest, payloads, key_digest, system_stream, number);
            CREATE TABLE origins (stream TEXT, number INTEGER, digest TEXT, kept BLOB, PRIMARY KEY (stream, number))
                WITHOUT ROWID;
            CREATE TABLE refs (stream, number, referred, what, digest);
            BEGIN;
            """
        )

    def load(self, stream: str) -> Standing | None:
        found = self._recent.get(stream)
        if found is not None:
            self._recent.move_to_end(stream)
            return found
        if self._has_spilled:
            row = self._disk.execute("SELECT standing FROM streams WHERE stream = ?", (stream,)).fetchone()
            if row is not None:
                return Standing.from_bytes(stream, row[0], self._kinds)
        return self._load_whole(stream) if self._has_whole else None

    def store(self, stream: str, standing: Standing) -> None:
        self._recent[stream] = standing
        self._recent.move_to_end(stream)
        if len(self._recent) > self._streams_max:
            oldest, spilled = self._recent.popitem(last=False)
            self._spill(oldest, spilled)

    def _load_whole(self, stream: str) -> Standing | None:
        row = self._disk.execute("SELECT * FROM whole WHERE stream = ?", (stream,)).fetchone()
        if row is None:
            return None
        head, kind = Head(*row[1:]), self._kinds[kind_name(stream)]
        return Standing(stream, kind, kind.begin(), head, goes_on=False, payloads_present=head.sequence_number)

    def remember_whole(self, stream: str, whole: WholeStream) -> None:
        self._whole.append((stream, *whole.head))
        if whole.key_digest is not None:
            self._whole_claims.append((whole.key_digest, stream))
        if len(self._whole) >= _WHOLE_TOGETHER:
            self._store_whole()

    def _store_whole(self) -> None:
        self._has_whole = True
        try:
            self._disk.executemany("INSERT INTO whole VALUES (?, ?, ?, ?, ?)", self._whole)
            self._disk.executemany("INSERT INTO claims VALUES (?, ?)", sorted(self._whole_claims))
        except sqlite3.IntegrityError:
            raise NotRemembered("a stream or key comes twice") from None
        self._whole.clear()
        self._whole_claims.clear()

    def count_whole(self) -> Mapping[str, int]:
        if self._whole:
            self._store_whole()
        if not self._has_whole:
            return {}
        self._spill_all()
        if self._disk.execute("SELECT 1 FROM whole JOIN streams USING (stream) LIMIT 1").fetchone():
            raise NotRemembered("a stream goes on after its end")
        counted = "SELECT substr(stream, 1, instr(stream, ':') - 1) AS kind, count(*) FROM whole GROUP BY kind"
        return dict(self._disk.execute(counted))

    def all(self) -> Iterator[tuple[str, Standing]]:
        self._spill_all()
        for stream, standing in self._disk.execute("SELECT stream, standing FROM streams ORDER BY stream"):
            yield stream, Standing.from_bytes(stream, standing, self._kinds)

    def claim(self, key: str, stream: str) -> str:
        written = self._disk.execute("INSERT OR IGNORE INTO claims VALUES (?, ?)", (key, stream))
        if written.rowcount == 1:
            return stream
        return str(self._disk.execute("SELECT stream FROM claims WHERE key = ?", (key,)).fetchone()[0])

    def remember_erasure(self, erased: Erased) -> None:
        self._disk.execute("INSERT INTO erasures VALUES (?, ?, ?, ?, ?, ?, ?)", erased)

    def erasures(self) -> Iterator[Erased]:
        for row in self._disk.execute("SELECT * FROM erasures ORDER BY rowid"):
            yield Erased(*row)

    def want_origin(self, place: EntryPlace) -> None:
        self._has_origins = True
        self._disk.execute("INSERT OR IGNORE INTO origins VALUES (?, ?, NULL, NULL)", place)

    def is_wanted(self, place: EntryPlace) -> bool:
        if not self._has_origins:
            return False
        row = self._disk.execute("SELECT 1 FROM origins WHERE stream = ? AND number = ? AND digest IS NULL", place)
        return row.fetchone() is not None

    def remember_origin(self, place: EntryPlace, origin: Origin) -> None:
        kept = None if origin.kept is None else canonical_bytes(origin.kept)
        self._disk.execute(
            "UPDATE origins SET digest = ?, kept = ? WHERE stream = ? AND number = ?",
            (origin.entry_digest, kept, *place),
        )

    def origin(self, place: EntryPlace) -> Origin:
        found = self._disk.execute("SELECT digest, kept FROM origins WHERE stream = ? AND number = ?", place).fetchone()
        digest, kept = (None, None) if found is None else found
        return Origin(digest, None if kept is None else parse_object(kept, bytes_max=len(kept)))

    def remember_reference(self, reference: Reference) -> None:
        place, referred, what, digest = reference
        self._disk.execute("INSERT INTO refs VALUES (?, ?, ?, ?, ?)", (*place, referred, what, digest))

    def references(self) -> Iterator[Reference]:
        for stream, number, referred, what, digest in self._disk.execute("SELECT * FROM refs ORDER BY rowid"):
            yield Reference(EntryPlace(stream, number), referred, what, digest)

    def remember_blob(self, place: EntryPlace, blob: ReferredBlob) -> None:
        self._blobs.add(place, blob)

    def blobs(self) -> Iterator[tuple[EntryPlace, ReferredBlob]]:
        return self._blobs.all()

    def claims(self) -> Iterator[tuple[str, str]]:
        """Each key with the stream that claimed it, in the order of keys."""
        yield from self._disk.execute("SELECT key, stream FROM claims ORDER BY key")

    def claimed_by(self, key: str) -> str | None:
        found = self._disk.execute("SELECT stream FROM claims WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def leave(self) -> None:
        """All of it is in its file from here on. NotRemembered as `count_whole`."""
        self.count_whole()
        self._spill_all()
        self._disk.execute("COMMIT")

    def _spill_all(self) -> None:
        while self._recent:
            self._spill(*self._recent.popitem())

    def _spill(self, stream: str, standing: Standing) -> None:
        self._has_spilled = True
        self._disk.execute("INSERT OR REPLACE INTO streams VALUES (?, ?)", (stream, standing.to_bytes()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disk.close()


def own_schemas() -> dict[str, bytes]:
    """This version's contracts, by file name."""
    return {file.name: file.read_bytes() for file in SCHEMAS.iterdir() if file.name.endswith(".schema.json")}
