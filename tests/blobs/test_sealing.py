"""Secret values of runs: sealed as blobs, committed to in the journal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.core.digest import digest_of_bytes
from app.core.errors import SecretMissing
from app.domain.runs.sealing import SealedSecret, open_secret, seal_secret
from app.keys.keyring import Keyring
from tests.blobs.conftest import Shelf, pieces_of

STREAM, PATH, SALT = "run:r-1", "3:2.1", bytes(range(32))
CARD: Any = {"card": "4111 1111 1111 1111", "cents": [1, 2]}


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return Keyring.open(tmp_path / "keys", {})


@pytest.mark.parametrize("value", [CARD, "", None, 0, [], "ü"])
def test_a_sealed_value_opens_to_what_it_was(keys: Keyring, value: Any) -> None:
    secret = seal_secret(keys, value, stream=STREAM, path=PATH, salt=SALT)
    assert open_secret(keys, secret, stream=STREAM, path=PATH, salt=SALT) == value


def test_nothing_tells_what_it_is_or_that_two_are_equal(keys: Keyring) -> None:
    one, same = (seal_secret(keys, CARD, stream=STREAM, path=PATH, salt=SALT) for _ in range(2))
    assert b"4111" not in one.sealed
    assert digest_of_bytes(one.sealed) != digest_of_bytes(same.sealed)
    assert one.commitment == same.commitment, "at one address of one run it is the same value"
    elsewhere = seal_secret(keys, CARD, stream=STREAM, path="4", salt=SALT)
    other_run = seal_secret(keys, CARD, stream="run:r-2", path=PATH, salt=bytes(32))
    assert len({one.commitment, elsewhere.commitment, other_run.commitment}) == 3


def test_what_is_of_another_place_or_was_changed_does_not_open(keys: Keyring, tmp_path: Path) -> None:
    secret = seal_secret(keys, CARD, stream=STREAM, path=PATH, salt=SALT)
    other = seal_secret(keys, "other", stream=STREAM, path=PATH, salt=SALT)
    flipped = bytes([*secret.sealed[:-1], secret.sealed[-1] ^ 1])
    cases: list[tuple[Any, SealedSecret, str, str, bytes]] = [
        (keys, secret, "run:r-2", PATH, SALT),
        (keys, secret, STREAM, "3:2.2", SALT),
        (keys, secret, STREAM, PATH, bytes(32)),
        (keys, secret._replace(sealed=flipped), STREAM, PATH, SALT),
        (keys, secret._replace(sealed=b""), STREAM, PATH, SALT),
        (keys, secret._replace(sealed=other.sealed), STREAM, PATH, SALT),
        (keys, secret._replace(commitment=other.commitment), STREAM, PATH, SALT),
        (Keyring.open(tmp_path / "others", {}), secret, STREAM, PATH, SALT),
    ]
    for seals, found, stream, path, salt in cases:
        with pytest.raises(SecretMissing):
            open_secret(seals, found, stream=stream, path=path, salt=salt)


async def test_it_is_stored_as_any_other_blob(keys: Keyring, shelf: Shelf) -> None:
    secret = seal_secret(keys, CARD, stream=STREAM, path=PATH, salt=SALT)
    sha256 = digest_of_bytes(secret.sealed)
    await shelf.blobs.put("default", sha256, pieces_of(secret.sealed))
    stored = await shelf.blobs.read("default", sha256, bytes_max=len(secret.sealed))
    assert b"4111" not in shelf.file(sha256).read_bytes()
    assert open_secret(keys, secret._replace(sealed=stored), stream=STREAM, path=PATH, salt=SALT) == CARD
    assert os.listdir(shelf.folder / ".incoming") == []
