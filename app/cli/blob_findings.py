"""What `tga doctor` says of blobs: whether those that entries refer to are there, and whether collection gets on."""

from __future__ import annotations

from typing import Final

from app.cli.findings import Finding
from app.config import Config
from app.connectors.blobs import open_object_store
from app.core.digest import Digest
from app.core.errors import BlobNotFound, TgaError
from app.core.limits import BLOB_RETRY_MS
from app.domain.runs.blobs import blob_path
from app.postgres.sessions import Sessions
from app.settings import Settings

_LOOKED_AT: Final = 20
_COUNTED_MAX: Final = 100_000  # a count of more takes long, and says nothing more
_COUNTS: Final = """
SELECT count(*) AS many, coalesce(sum(size_bytes), 0)::bigint AS size_bytes,
       count(*) FILTER (WHERE state = 'going'
                          AND touched_at < clock_timestamp() - 4 * $2::bigint * interval '1 millisecond') AS stuck
  FROM (SELECT state, size_bytes, touched_at FROM tga.blobs LIMIT $1) AS b
"""
_REFERRED: Final = """
SELECT b.tenant, encode(b.sha256, 'hex') AS sha256
  FROM tga.blobs b WHERE b.state = 'used' ORDER BY b.tenant, b.sha256 LIMIT $1
"""


async def blob_finding(settings: Settings, config: Config | None, sessions: Sessions) -> Finding:
    """Looks for the objects of some blobs that entries refer to; reads none of them. Makes no folder."""
    (counted,) = await sessions.fetch(_COUNTS, _COUNTED_MAX, BLOB_RETRY_MS)
    if not counted["many"]:
        return Finding("blobs", True, "none")
    url = None if config is None else config.blobs.url
    folder = settings.home / "blobs"
    if url is None and not folder.is_dir():
        remedy = "Restore it from your backup, or name the place where blobs are in [blobs] url."
        return Finding("blobs", False, f"{counted['many']} are known, and there is no folder {folder}", remedy)
    referred = await sessions.fetch(_REFERRED, _LOOKED_AT)
    missing = []
    try:
        objects = open_object_store(url, folder=folder)
        for row in referred:
            try:
                await objects.read(blob_path(row["tenant"], Digest(row["sha256"])), start=0, length=0)
            except BlobNotFound:
                missing.append(row["sha256"])
    except TgaError as error:
        return Finding("blobs", False, str(error), error.next_step)
    if missing:
        remedy = "Restore them from a backup of the object store: runs that need them stop with BLOB_DAMAGED."
        found = f"{len(missing)} of {len(referred)} that entries refer to are missing, {missing[0]} among them"
        return Finding("blobs", False, found, remedy)
    more = " or more" if counted["many"] == _COUNTED_MAX else ""
    found = f"{counted['many']}{more}, {counted['size_bytes']} bytes; {len(referred)} that entries refer to are there"
    if counted["stuck"]:
        remedy = "The gateway's log says why the object store does not delete them."
        return Finding("blobs", True, f"{found}; {counted['stuck']} are to be deleted and stay", remedy, warning=True)
    return Finding("blobs", True, found)
