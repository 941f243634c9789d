"""Whatever stands in a bundle or a note: only our own errors, in bounded time and memory, and both verifiers agree."""

from __future__ import annotations

import json
import random
import tempfile
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.cli.verify_bundle import load_keys
from app.core.errors import NoteInvalid, TgaError
from app.core.merkle import Frontier, leaf_hash
from app.core.note import TlogProof, TreeHead, VerifierKey, open_note, sign_note
from app.domain.log.bundle import ENTRIES, HEADS, KEYS, MANIFEST, EntryLine, HeadLine, Manifest
from app.domain.log.heads import SignedHead, fits
from tests.export.by_hand import write_by_hand
from tests.export.changing import refit
from tests.export.world import copied, judge, judge_alone

KEY = Ed25519PrivateKey.generate()
VERIFIER = VerifierKey("example.org/fuzzed", KEY.public_key().public_bytes_raw())
FIELDS = ["leaf_index", "stream", "sequence_number", "entry", "artifact", "proof", "size", "note"]
QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed") / "bundle"
    write_by_hand(folder, KEY, VERIFIER, traces=6)
    assert judge(folder, VERIFIER).findings == judge_alone(folder, VERIFIER).findings == []
    return folder


@QUIET
@given(
    name=st.sampled_from([ENTRIES, ENTRIES, ENTRIES, HEADS, KEYS, MANIFEST]),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["flip", "cut", "insert", "repeat", "swap", "value"]),
    is_refitted=st.booleans(),
)
def test_a_broken_bundle_is_refused_by_both_and_by_nothing_else_than_our_errors(
    whole: Path, name: str, seed: int, kind: str, is_refitted: bool
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = copied(whole, Path(made) / "bundle")
        raw = (folder / name).read_bytes()
        mutated = _mutated(raw, kind, random.Random(seed))
        (folder / name).write_bytes(mutated)
        if is_refitted and name != MANIFEST:
            refit(folder, name)
        began = time.thread_time()
        ours, theirs = judge(folder, VERIFIER), judge_alone(folder, VERIFIER)
        assert time.thread_time() - began < 10
        if name == HEADS and _last_note(mutated) == _last_note(raw):
            # Older heads, and what stands beside the last one's signed note, are left to the command.
            assert ours.findings or not theirs.findings
        else:
            assert ours.is_sound == theirs.is_sound, (ours.findings, theirs.findings)
        if mutated == raw:
            assert ours.is_sound
        elif name == ENTRIES and not is_refitted:
            assert ours.findings


def _last_note(heads: bytes) -> object:
    try:
        last = json.loads(heads.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return last.get("note") if isinstance(last, dict) else None


def _mutated(raw: bytes, kind: str, chance: random.Random) -> bytes:
    place = chance.randrange(len(raw))
    lines = raw.splitlines(keepends=True)
    line = chance.randrange(len(lines))
    match kind:
        case "flip":
            return raw[:place] + bytes([raw[place] ^ (1 << chance.randrange(8))]) + raw[place + 1 :]
        case "cut":
            return raw[:place]
        case "insert":
            return raw[:place] + bytes(chance.randrange(256) for _ in range(3)) + raw[place:]
        case "repeat":
            return b"".join([*lines[:line], lines[line], *lines[line:]])
        case "swap":
            other = chance.randrange(len(lines))
            lines[line], lines[other] = lines[other], lines[line]
            return b"".join(lines)
        case _:
            return _with_another_value(raw, lines, line, chance)


def _with_another_value(raw: bytes, lines: list[bytes], line: int, chance: random.Random) -> bytes:
    try:
        document: dict[str, Any] = json.loads(lines[line])
        field = chance.choice(sorted(document))
    except (ValueError, IndexError, TypeError):
        return raw
    document[field] = chance.choice([None, 0, -1, 1.5, True, "", "x", [], {}, 2**60, [[]] * 3, {"base64": "AA=="}])
    return b"".join([*lines[:line], json.dumps(document).encode() + b"\n", *lines[line + 1 :]])


@given(st.binary(max_size=400))
def test_no_line_or_manifest_raises_anything_but_our_errors(raw: bytes) -> None:
    for read in (EntryLine.from_line, HeadLine.from_line, Manifest.from_bytes):
        with suppress(TgaError):
            read(raw)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["leaf_index", "stream", "entry", "proof", "size", "note"]), inner, max_size=6
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_in_a_line_raises_anything_but_our_errors(value: Any) -> None:
    raw = json.dumps(value).encode()
    for read in (EntryLine.from_line, HeadLine.from_line, Manifest.from_bytes):
        with suppress(TgaError):
            read(raw)


HEAD = TreeHead("example.org/fuzzed", 3, Frontier(3, [leaf_hash(b"a"), leaf_hash(b"b")]).root())
SIGNED = sign_note(HEAD.to_text(), VERIFIER, KEY.sign)


@given(st.integers(0, len(SIGNED) - 1), st.characters(exclude_categories=["Cs"]))
def test_a_note_with_one_other_character_is_refused(place: int, character: str) -> None:
    changed = SIGNED[:place] + character + SIGNED[place + 1 :]
    try:
        text = open_note(changed, [VERIFIER], fits)
    except NoteInvalid:
        return
    assert text == HEAD.to_text()


@given(st.text(max_size=300) | st.text("\n— +/=AB01", max_size=80))
def test_no_text_raises_anything_but_our_errors(text: str) -> None:
    for read in (SignedHead.from_note, TlogProof.from_text, VerifierKey.from_text, load_keys):
        with suppress(TgaError):
            read(text)


@pytest.mark.parametrize("name", [ENTRIES, HEADS, MANIFEST, KEYS])
def test_a_huge_line_costs_bounded_memory(whole: Path, tmp_path: Path, name: str) -> None:
    folder = copied(whole, tmp_path / "bundle")
    with (folder / name).open("wb") as file:
        file.seek(200_000_000)  # a line without an end, which takes no room on the disk
        file.write(b"x")
    tracemalloc.start()
    try:
        verdict = judge(folder, VERIFIER)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert verdict.findings
    assert peak < 40_000_000


def test_a_bundle_of_nothing_but_wrong_lines_ends_at_a_bound(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "bundle")
    line = (folder / ENTRIES).read_bytes().splitlines(keepends=True)[3].replace(b'"leaf_index":3', b'"leaf_index":null')
    (folder / ENTRIES).write_bytes(line * 5_000)
    refit(folder, ENTRIES)
    for verdict in (judge(folder, VERIFIER), judge_alone(folder, VERIFIER)):
        assert len(verdict.after_head) in range(990, 1_001)
        assert len(verdict.findings) == 2  # the tree's leaves are missing, and that it stopped
