"""What `tga doctor` says of blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

from app.cli.blob_findings import blob_finding
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.settings import Settings
from tests.blobs.conftest import Shelf
from tests.blobs.test_collection import BLOB, DATA, referring
from tests.conftest import Admin


async def test_the_doctor_finds_blobs_that_are_missing_and_deletions_that_do_not_end(
    shelf: Shelf, ledger: PostgresLedger, sessions: Sessions, admin: Admin, tmp_path: Path
) -> None:
    settings = Settings.from_environment({"TGA_HOME": str(tmp_path)})
    assert (await blob_finding(settings, None, sessions)).found == "none"
    await shelf.put(DATA)
    await ledger.commit(referring(1))
    found = await blob_finding(settings, None, sessions)
    assert (found.is_right, found.warning) == (True, False)
    assert found.found == f"1, {len(DATA)} bytes; 1 that entries refer to are there"

    old = await shelf.put(b"old")
    await admin.execute(
        "UPDATE tga.blobs SET state = 'going', touched_at = '2020-01-01' WHERE sha256 <> $1", bytes.fromhex(BLOB)
    )
    found = await blob_finding(settings, None, sessions)
    assert found.warning
    assert "1 are to be deleted and stay" in found.found
    assert old not in found.found

    shelf.file(BLOB).unlink()
    found = await blob_finding(settings, None, sessions)
    assert not found.is_right
    assert BLOB in found.found

    shutil.rmtree(shelf.folder)
    found = await blob_finding(settings, None, sessions)
    assert not found.is_right
    assert "there is no folder" in found.found
    assert not shelf.folder.exists(), "it makes none"
