"""C2SP signed-note, tlog-checkpoint and tlog-proof: the published examples open, what we write reads back, and hostile
text raises NoteInvalid and nothing else."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import NoteInvalid
from app.core.limits import NOTE_BYTES_MAX, NOTE_SIGNATURES_MAX
from app.core.merkle import TREE_SIZE_MAX, Hash
from app.core.note import TlogProof, TreeHead, VerifierKey, open_note, read_note, sign_note
from app.domain.log.heads import fits

# The example of Go's sumdb/note documentation.
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETERS_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)

PRIVATE = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"a key for tests").digest())
KEY = VerifierKey("tga.example/log", PRIVATE.public_key().public_bytes_raw())
OTHER = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"another key for tests").digest())
OTHER_KEY = VerifierKey("other.example/log", OTHER.public_key().public_bytes_raw())
HEAD = TreeHead("tga.example/log", 4, Hash(hashlib.sha256(b"root").digest()))
NOTE = sign_note(HEAD.to_text(), KEY, PRIVATE.sign)

thorough = settings(deadline=None, max_examples=300)


def open_with(note: str | bytes, *keys: VerifierKey) -> str:
    return open_note(note, keys or [KEY], fits)


def test_the_published_note_opens_with_the_published_key() -> None:
    key = VerifierKey.from_text(PETER)
    assert key.to_text() == PETER
    assert open_with(PETERS_NOTE, key) == PETERS_NOTE.partition("\n\n")[0] + "\n"
    assert open_with(PETERS_NOTE.encode(), key) == PETERS_NOTE.partition("\n\n")[0] + "\n"


def test_our_own_note_stays_as_it_is() -> None:
    """A vector of our own: Ed25519 has no randomness, so the same key and head give the same bytes for ever."""
    assert hashlib.sha256(NOTE.encode()).hexdigest() == OWN_NOTE_SHA256
    assert KEY.to_text() == OWN_KEY


OWN_NOTE_SHA256 = "a90ec74928f87692e21ee848890c6867141a4f76bb174e982d9937b5949d3335"
OWN_KEY = "tga.example/log+20fd3910+AY8VQ6HE6zthZSaFWX7PezL0P9tXNn3hRNmTJPDIqusJ"


def test_a_head_reads_back_as_it_was_written() -> None:
    text = open_with(NOTE)
    assert TreeHead.from_text(text) == HEAD
    assert read_note(NOTE) == (text, [(KEY.name, KEY.key_id)])


def test_signatures_of_strangers_are_passed_over_and_a_wrong_one_spoils() -> None:
    strangers = sign_note(HEAD.to_text(), OTHER_KEY, OTHER.sign).rpartition("\n\n")[2]
    ours = NOTE.rpartition("\n\n")[2]
    both = f"{HEAD.to_text()}\n{strangers}{ours}"
    assert open_with(both) == HEAD.to_text()
    assert open_with(both, OTHER_KEY) == HEAD.to_text()
    forged = sign_note(HEAD.to_text(), KEY, OTHER.sign).rpartition("\n\n")[2]
    for wrong in (f"{HEAD.to_text()}\n{strangers}{forged}", f"{HEAD.to_text()}\n{ours}{forged}"):
        with pytest.raises(NoteInvalid):
            open_with(wrong)


def test_without_a_known_signature_nothing_opens() -> None:
    for keys in (
        [],
        [OTHER_KEY],
        [VerifierKey("other.example/log", KEY.public_key)],
        [VerifierKey(KEY.name, bytes(32))],
    ):
        with pytest.raises(NoteInvalid):
            open_note(NOTE, keys, fits)


SIGNATURE = NOTE.rpartition("\n\n")[2]
SPOILED = {
    "nothing": "",
    "no blank line": NOTE.replace("\n\n", "\n"),
    "no signature": HEAD.to_text() + "\n",
    "no last line break": NOTE[:-1],
    "something after it": NOTE + "more\n",
    "a blank line after it": NOTE + "\n",
    "a hyphen for the dash": NOTE.replace("—", "-"),
    "two spaces": NOTE.replace("— ", "—  "),
    "carriage returns": NOTE.replace("\n", "\r\n"),
    "a NUL": NOTE.replace("4", "4\x00"),
    "a tab": NOTE.replace("4", "4\t"),
    "a name with a plus": NOTE.replace("— tga.example", "— tga+example"),
    "no name": NOTE.replace("— tga.example/log ", "— "),
    "not base64": NOTE.replace(SIGNATURE.split(" ")[2][:4], "!!!!"),
    "base64 without padding": NOTE.replace("=\n", "\n"),
    "a short signature": HEAD.to_text() + "\n— tga.example/log AAAA\n",
    "another size": NOTE.replace("\n4\n", "\n5\n"),
    "another origin": NOTE.replace("tga.example/log\n4", "tga.example/logs\n4"),
    "too many signatures": HEAD.to_text() + "\n" + SIGNATURE * (NOTE_SIGNATURES_MAX + 1),
    "too long": "x" * NOTE_BYTES_MAX + NOTE,
    "a lone surrogate": "\ud800" + NOTE,
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_note_does_not_open(name: str) -> None:
    assert SPOILED[name] != NOTE
    with pytest.raises(NoteInvalid):
        open_with(SPOILED[name])


def test_bytes_that_are_no_utf8_do_not_open() -> None:
    for wrong in (b"\xff" + NOTE.encode(), NOTE.encode("utf-16")):
        with pytest.raises(NoteInvalid):
            open_with(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "tga.example/log\n4\n",
        "\n4\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n04\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n+4\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n-4\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n٤\n" + b64encode(bytes(32)).decode() + "\n",
        f"log\n{TREE_SIZE_MAX + 1}\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n" + "9" * 5_000 + "\n" + b64encode(bytes(32)).decode() + "\n",
        "log\n4\n" + b64encode(bytes(31)).decode() + "\n",
        "log\n4\n" + b64encode(bytes(32)).decode() + "\nextension\n",
        "log\n4\n" + b64encode(bytes(32)).decode(),
        "log\n4\n" + b64encode(bytes(32)).decode()[:-2] + "B=\n",
    ],
)
def test_what_is_no_tree_head_is_refused(text: str) -> None:
    with pytest.raises(NoteInvalid):
        TreeHead.from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "name+c74f20a3",
        PETER.replace("c74f20a3", "c74f20a4"),
        PETER.replace("PeterNeumann", "Peter"),
        PETER.replace("PeterNeumann", ""),
        PETER.replace("PeterNeumann", "Peter Neumann"),
        PETER.replace("+AR", "+AB"),
        PETER.replace("+AR", "+BR"),
        PETER[:-4],
        PETER + "AAAA",
    ],
)
def test_what_is_no_verifier_key_is_refused(text: str) -> None:
    with pytest.raises(NoteInvalid):
        VerifierKey.from_text(text)


PROOF = TlogProof(3, [Hash(bytes([n]) * 32) for n in range(3)], NOTE)


@pytest.mark.parametrize("proof", [PROOF, TlogProof(0, [], NOTE), TlogProof(7, PROOF.hashes, NOTE, b"extra")])
def test_a_proof_reads_back_as_it_was_written(proof: TlogProof) -> None:
    found = TlogProof.from_text(proof.to_text())
    assert found == proof
    assert found.to_text() == proof.to_text()
    assert re.match(r"c2sp\.org/tlog-proof@v1\n(extra \S+\n)?index \d+\n", proof.to_text())


WRITTEN = PROOF.to_text()
SPOILED_PROOFS = {
    "nothing": "",
    "another version": WRITTEN.replace("@v1", "@v2"),
    "no index": WRITTEN.replace("index 3\n", ""),
    "an index with a zero before it": WRITTEN.replace("index 3", "index 03"),
    "a negative index": WRITTEN.replace("index 3", "index -3"),
    "a huge index": WRITTEN.replace("index 3", f"index {TREE_SIZE_MAX + 1}"),
    "a short hash": WRITTEN.replace(b64encode(bytes(32)).decode(), b64encode(bytes(31)).decode()),
    "no base64": WRITTEN.replace(b64encode(bytes(32)).decode(), "?" * 44),
    "too many hashes": TlogProof(3, [Hash(bytes(32))] * 65, NOTE).to_text(),
    "extra after the index": WRITTEN.replace("index 3\n", "index 3\nextra AAAA\n"),
    "no note": WRITTEN.partition("\n\n")[0],
    "too long": TlogProof(3, [], NOTE * 1_000).to_text(),
}


@pytest.mark.parametrize("name", SPOILED_PROOFS)
def test_a_spoiled_proof_is_refused(name: str) -> None:
    with pytest.raises(NoteInvalid):
        TlogProof.from_text(SPOILED_PROOFS[name])


hostile = st.one_of(
    st.text(max_size=400),
    st.text(alphabet="—tga.example/log +=\n\r\x00Az09/", max_size=400),
    st.lists(st.sampled_from([NOTE, WRITTEN, SIGNATURE, "\n", "\n\n", "— ", "index 3", "4", "\ud800", "é"])).map(
        "".join
    ),
)


@thorough
@given(hostile)
def test_hostile_text_raises_note_invalid_and_nothing_else(text: str) -> None:
    for read in (
        lambda: open_with(text),
        lambda: open_with(text.encode("utf-8", "surrogatepass")),
        lambda: read_note(text),
        lambda: TreeHead.from_text(text),
        lambda: VerifierKey.from_text(text),
        lambda: TlogProof.from_text(text),
    ):
        try:
            read()
        except NoteInvalid:
            continue


@thorough
@given(st.integers(0, len(NOTE.encode()) - 1), st.integers(0, 7))
def test_one_flipped_bit_in_a_note_never_opens_as_another_text(place: int, bit: int) -> None:
    raw = bytearray(NOTE.encode())
    raw[place] ^= 1 << bit
    with pytest.raises(NoteInvalid):
        open_with(bytes(raw))


@thorough
@given(
    st.from_regex(r"[!-*,-~]{1,40}", fullmatch=True),
    st.integers(0, TREE_SIZE_MAX),
    st.binary(min_size=32, max_size=32),
)
def test_every_head_reads_back(origin: str, size: int, root: bytes) -> None:
    head = TreeHead(origin, size, Hash(root))
    key = VerifierKey(origin, KEY.public_key)
    note = sign_note(head.to_text(), key, PRIVATE.sign)
    assert TreeHead.from_text(open_with(note, VerifierKey.from_text(key.to_text()))) == head
