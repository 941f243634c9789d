"""The log's key and the signer's memory: one history, whatever the database says."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.ed25519 import key_id_of
from app.core.errors import ConcurrentExecution, LogForked, NoteInvalid, SettingInvalid
from app.core.merkle import Frontier, Hash, leaf_hash, node_hash
from app.core.note import TreeHead, VerifierKey, open_note, read_note
from app.domain.log.heads import SignedHead, fits, verify_follows
from app.keys.log_signer import LogSigner
from tests.log.auditor import plain_root

LEAVES = [leaf_hash(b"%d" % n) for n in range(8)]
OTHERS = [leaf_hash(b"other %d" % n) for n in range(8)]


def root(size: int, leaves: list[Hash] = LEAVES) -> Hash:
    return Hash(plain_root(leaves[:size]))


def proof_1_2() -> list[Hash]:
    return [LEAVES[1]]


def proof_2_4() -> list[Hash]:
    return [node_hash(LEAVES[2], LEAVES[3])]


def signed_two(signer: LogSigner) -> SignedHead:
    return signer.sign(2, root(2), [], after=None)


def test_what_is_signed_opens_with_the_verifier_key_and_is_remembered(signer: LogSigner, keys: Path) -> None:
    signed = signed_two(signer)
    assert open_note(signed.note, [signer.verifier_key], fits) == TreeHead(signer.origin, 2, root(2)).to_text()
    assert VerifierKey.from_text(signer.verifier_key.to_text()) == signer.verifier_key
    assert signer.load_remembered() == signed
    assert (keys / "log.head").read_text() == signed.note
    assert stat.S_IMODE((keys / "log.head").stat().st_mode) == 0o600
    assert LogSigner.open(keys, environment={}).load_remembered() == signed


def test_a_head_that_follows_is_signed(signer: LogSigner) -> None:
    first = signed_two(signer)
    second = signer.sign(4, root(4), proof_2_4(), after=first)
    assert signer.load_remembered() == second


def test_the_same_head_again_is_the_same_note(signer: LogSigner) -> None:
    first = signed_two(signer)
    assert signer.sign(2, root(2), [], after=first) == first
    assert signer.load_remembered() == first


@pytest.mark.parametrize(
    ("size", "found", "proof"),
    [
        pytest.param(1, root(1), [], id="smaller"),
        pytest.param(0, root(0), [], id="empty"),
        pytest.param(2, root(2, OTHERS), [], id="the same size, another root"),
        pytest.param(4, root(4, OTHERS), [node_hash(OTHERS[2], OTHERS[3])], id="another history"),
        pytest.param(4, Hash(plain_root(OTHERS[:2] + LEAVES[2:4])), proof_2_4(), id="another beginning"),
        pytest.param(4, root(4), [], id="no proof"),
        pytest.param(4, root(4), [LEAVES[0]], id="another proof"),
        pytest.param(4, root(4), proof_2_4() * 2, id="too much proof"),
    ],
)
def test_what_does_not_follow_is_never_signed(
    signer: LogSigner, keys: Path, size: int, found: Hash, proof: list[Hash]
) -> None:
    first = signed_two(signer)
    with pytest.raises(LogForked):
        signer.sign(size, found, proof, after=first)
    with pytest.raises(LogForked):
        signer.remember(SignedHead(TreeHead("x", size, found), "x\n"), proof, after=first)
    assert (keys / "log.head").read_text() == first.note


def test_a_stale_view_of_the_memory_signs_nothing(signer: LogSigner) -> None:
    first = signed_two(signer)
    second = signer.sign(4, root(4), proof_2_4(), after=first)
    for stale in (None, first):
        with pytest.raises(ConcurrentExecution):
            signer.sign(4, root(4), proof_2_4(), after=stale)
    assert signer.load_remembered() == second


@pytest.mark.parametrize("content", [b"", b"\xff", b"no note", b"origin\n1\nAAAA\n\n\xe2\x80\x94 x AAAAAAAA\n"])
def test_a_memory_that_cannot_be_read_signs_nothing(signer: LogSigner, keys: Path, content: bytes) -> None:
    first = signed_two(signer)
    (keys / "log.head").write_bytes(content)
    with pytest.raises(SettingInvalid):
        signer.sign(4, root(4), proof_2_4(), after=first)
    with pytest.raises(SettingInvalid):
        LogSigner.open(keys, environment={})
    assert (keys / "log.head").read_bytes() == content


def test_a_memory_or_key_that_others_can_reach_is_refused(signer: LogSigner, keys: Path) -> None:
    signed_two(signer)
    for name in ("log.head", "log.key"):
        (keys / name).chmod(0o640)
        with pytest.raises(SettingInvalid):
            LogSigner.open(keys, environment={})
        (keys / name).chmod(0o600)
    LogSigner.open(keys, environment={})


def test_a_folder_that_cannot_be_written_signs_nothing(signer: LogSigner, keys: Path) -> None:
    """A file stands where the memory's next version would be written: the same failure for root and everyone else."""
    first = signed_two(signer)
    (keys / "log.head.unfinished").mkdir()
    with pytest.raises(SettingInvalid):
        signer.sign(4, root(4), proof_2_4(), after=first)
    assert signer.load_remembered() == first


def test_a_half_written_memory_is_not_there(signer: LogSigner, keys: Path) -> None:
    first = signed_two(signer)
    (keys / "log.head.unfinished").write_text("half")
    assert LogSigner.open(keys, environment={}).load_remembered() == first
    signer.sign(4, root(4), proof_2_4(), after=first)
    assert not (keys / "log.head.unfinished").exists()


def test_the_key_may_come_from_the_environment_and_the_memory_stays_in_the_folder(keys: Path) -> None:
    raw = os.urandom(32)
    signer = LogSigner.open(keys, environment={"TGA_LOG_KEY": base64.b64encode(raw).decode()})
    assert signer.public_key == Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw()
    signed = signed_two(signer)
    assert sorted(one.name for one in keys.iterdir() if not one.name.startswith(".")) == ["log.head"]
    assert signer.load_remembered() == signed
    with pytest.raises(SettingInvalid, match="TGA_LOG_KEY"):
        signer.rotate()


def test_the_key_shows_in_no_repr_and_no_error(keys: Path) -> None:
    secret = base64.b64encode(os.urandom(31)).decode()
    with pytest.raises(SettingInvalid) as failure:
        LogSigner.open(keys, environment={"TGA_LOG_KEY": secret})
    assert secret not in str(failure.value)
    signer = LogSigner.open(keys, environment={})
    assert (keys / "log.key").read_text().strip() not in repr(signer)


def test_an_origin_is_the_one_that_is_configured_or_stays_the_first(keys: Path, tmp_path: Path) -> None:
    signer = LogSigner.open(keys, environment={})
    assert signer.origin.startswith("tga.local/")
    assert LogSigner.open(tmp_path / "other", origin="acme.example/log", environment={}).origin == "acme.example/log"
    origin = signer.origin
    signed_two(signer)
    signer.rotate()
    assert signer.origin == origin
    assert LogSigner.open(keys, environment={}).origin == origin


def test_after_a_rotation_old_heads_verify_and_the_first_new_one_is_signed_by_both(keys: Path) -> None:
    signer = LogSigner.open(keys, environment={})
    old_key, first = signer.verifier_key, signed_two(signer)
    new_key = signer.rotate()
    assert new_key != old_key
    assert new_key.name == old_key.name
    retired = keys / f"log.{key_id_of(old_key.public_key).partition(':')[2]}.retired"
    assert retired.exists()
    second = signer.sign(4, root(4), proof_2_4(), after=first)
    for key in (old_key, new_key):
        open_note(second.note, [key], fits)
    assert len(read_note(second.note)[1]) == 2
    open_note(first.note, [old_key], fits)
    with pytest.raises(NoteInvalid):
        open_note(first.note, [new_key], fits)
    frontier = Frontier()
    for leaf in LEAVES:
        frontier.append(leaf)
    third = signer.sign(8, frontier.root(), [Hash(plain_root(LEAVES[4:8]))], after=second)
    assert len(read_note(third.note)[1]) == 1, "from then on the new one alone"


def test_after_a_rotation_without_the_old_key_the_new_one_signs_alone(keys: Path) -> None:
    signer = LogSigner.open(keys, environment={})
    first = signed_two(signer)
    given = {"TGA_LOG_KEY": base64.b64encode(os.urandom(32)).decode()}
    (keys / "log.key").unlink()
    second = LogSigner.open(keys, environment=given).sign(4, root(4), proof_2_4(), after=first)
    assert len(read_note(second.note)[1]) == 1


def test_the_first_head_needs_no_proof_and_every_other_does() -> None:
    verify_follows(TreeHead("x", 2, root(2)), [], after=None)
    verify_follows(TreeHead("x", 2, root(2)), proof_1_2(), after=TreeHead("x", 1, root(1)))
    with pytest.raises(LogForked):
        verify_follows(TreeHead("x", 2, root(2)), [], after=TreeHead("x", 1, root(1)))


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"short", b""])
def test_keys_under_which_a_signature_binds_to_nothing_fit_nothing(key: bytes) -> None:
    assert not fits(key, bytes(64), b"message")
    assert not fits(key, b"", b"message")
