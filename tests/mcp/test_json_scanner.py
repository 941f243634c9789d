"""Looking through JSON in slices finds what `json` finds, and nothing where `json` finds nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.connectors.json_scanner import JsonScanner, Kind, ScanState
from app.core.limits import JSON_SCAN_DEPTH_MAX, JSON_SCAN_STEP_BYTES, TEXT_CHARS_MAX

WANTED = frozenset(
    {("id",), ("method",), ("result", "isError"), ("result", "resultType"), ("error", "code"), ("error", "message")}
)
PATHS = WANTED | {("result",), ("error",)}
_EXAMPLES = int(os.environ.get("TGA_TEST_EXAMPLES", "150"))


def scanned(raw: bytes, cuts: list[int] | None = None) -> JsonScanner:
    scanner = JsonScanner(WANTED, hashed="result")
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts or []), len(raw)]
    for start, end in itertools.pairwise(edges):
        scanner.feed(raw[start:end])
    scanner.finish()
    return scanner


def json_says(raw: bytes) -> tuple[dict[tuple[str, ...], Any], bool] | None:
    """What stands at the paths, and whether one of them is there twice; None if it is no JSON object."""
    twice: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in set(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=members)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    found: dict[tuple[str, ...], Any] = {}
    for path in PATHS:
        at: Any = document
        for name in path:
            at = at[name] if isinstance(at, dict) and name in at else Ellipsis
        if at is not Ellipsis:
            found[path] = Kind.OBJECT if isinstance(at, dict) else Kind.ARRAY if isinstance(at, list) else at
    return found, bool(twice)


def same(ours: dict[tuple[str, ...], Any], theirs: dict[tuple[str, ...], Any]) -> bool:
    def shown(found: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], str]:
        return {path: repr(value[:64] if isinstance(value, str) else value) for path, value in found.items()}

    return shown(ours) == shown(theirs)


_NAMES = st.one_of(
    st.sampled_from(["id", "method", "result", "error", "isError", "resultType", "code", "message", "content", ""]),
    st.text(max_size=8),
)
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["complete", '"\\'])
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(_NAMES, inner, max_size=5))
)
_DOCUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=6)
_WRITTEN = st.builds(
    lambda document, ascii_only, indent, around: (
        around + json.dumps(document, ensure_ascii=ascii_only, indent=indent) + around
    ).encode("utf-8", "surrogatepass"),
    _DOCUMENTS,
    st.booleans(),
    st.sampled_from([None, 0, 1]),
    st.sampled_from(["", " ", "\r\n\t "]),
)
_CUTS = st.lists(st.integers(0, 400), max_size=12)
_SIGNS = st.sampled_from(list('{}[],:"\\0e-.tn u\x01é'))
_CHANGES = st.lists(st.tuples(st.integers(0, 400), _SIGNS), max_size=3)


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_WRITTEN, _CUTS)
def test_it_finds_what_json_finds_however_the_text_is_cut(raw: bytes, cuts: list[int]) -> None:
    said = json_says(raw)
    scanner = scanned(raw, cuts)
    assert (scanner.state is ScanState.COMPLETE) == (said is not None)
    if said is not None:
        assert not scanner.is_ambiguous
        assert same(scanner.found, said[0])


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_WRITTEN, _CUTS, _CHANGES)
def test_what_is_no_json_is_told_as_json_tells_it(raw: bytes, cuts: list[int], changes: list[tuple[int, str]]) -> None:
    text = raw.decode("utf-8", "replace")
    for at, sign in changes:
        text = text[: at % (len(text) + 1)] + sign + text[at % (len(text) + 1) + (at % 2) :]
    raw = text.encode()
    said = json_says(raw)
    scanner = scanned(raw, cuts)
    assert (scanner.state is ScanState.COMPLETE) == (said is not None)
    if said is not None and not said[1]:
        assert not scanner.is_ambiguous
        assert same(scanner.found, said[0])


@settings(max_examples=_EXAMPLES, deadline=None)
@given(_VALUES, _CUTS, st.booleans())
def test_the_hash_is_over_the_result_as_it_stands(value: Any, cuts: list[int], ascii_only: bool) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode("utf-8", "replace")
    raw = b'{"a": {"result": 1}, "result" :\n ' + written + b' , "id": 7}'
    scanner = scanned(raw, cuts)
    assert scanner.state is ScanState.COMPLETE
    assert (scanner.hashed_sha256, scanner.hashed_bytes) == (hashlib.sha256(written).hexdigest(), len(written))


@pytest.mark.parametrize(
    "text",
    [
        '{"result":{"isError":true,"isError":false}}',
        '{"result":{"isError":true,"is\\u0045rror":false}}',
        '{"result":{"isError":true},"result":{}}',
        '{"error":{"code":1},"error":null,"result":{}}',
        '{"id":1,"id":2,"result":{}}',
    ],
)
def test_a_wanted_member_that_is_there_twice_is_ambiguous(text: str) -> None:
    for cut in range(len(text)):
        scanner = scanned(text.encode(), [cut])
        assert scanner.state is ScanState.COMPLETE
        assert scanner.is_ambiguous


@pytest.mark.parametrize(
    "text",
    [
        '{"result":{"content":[{"isError":true}],"x":{"isError":true},"s":"\\"isError\\":true"}}',
        '{"x":{"result":{"isError":true}},"s":"{\\"error\\":1}","result":{}}',
        '{"result":[{"isError":true},"isError",true]}',
    ],
)
def test_what_stands_elsewhere_is_not_taken_for_it(text: str) -> None:
    for cut in range(len(text)):
        scanner = scanned(text.encode(), [cut])
        assert scanner.state is ScanState.COMPLETE
        assert ("result", "isError") not in scanner.found
        assert ("error",) not in scanner.found


def test_depth_and_numbers_without_end_are_beyond_it() -> None:
    for raw in (b'{"a":' + b"[" * JSON_SCAN_DEPTH_MAX, b'{"a":1' + b"0" * 10_000, b'{"a":[' + b"x" * 10_000):
        scanner = JsonScanner(WANTED, hashed="result")
        for at in range(len(raw)):
            scanner.feed(raw[at : at + 1])
        assert scanner.finish() is ScanState.BEYOND


def test_a_text_that_matters_is_kept_up_to_its_bound() -> None:
    text = 'é\\"\n' * 4_000
    for ascii_only in (True, False):
        raw = json.dumps({"error": {"code": 1, "message": text}}, ensure_ascii=ascii_only).encode()
        scanner = scanned(raw, list(range(0, len(raw), 1_000)))
        kept = scanner.found["error", "message"]
        assert TEXT_CHARS_MAX // 12 < len(kept) <= TEXT_CHARS_MAX
        assert text.startswith(kept)


# The worst that a server can send. In `commas`, every comma at which a run could end stands within a string.
_UNITS = {
    "lists": b"[0],",
    "empty": b"[],",
    "numbers": b"0,",
    "strings": b'"",',
    "escapes": b'"\\n\\ud800",',
    "objects": b'{"a":0},',
    "nested": b'{"a":[{}]},[[[0]]],',
    "space": b"\n",
    "commas": b"[0]," * 10 + b'"' + b"],}," * 60 + b'",',
    "long": b'"' + b"\\n" * 5_000 + b'",',
}


@pytest.mark.parametrize("kind", _UNITS)
def test_hostile_texts_take_linear_time_and_bounded_memory(kind: str) -> None:
    unit = _UNITS[kind]

    def cost_s(size: int) -> float:
        raw = b'{"result":{"content":[' + unit * (size // len(unit)) + b'0],"isError":true}}'
        best = float("inf")
        for _ in range(2):
            scanner = JsonScanner(WANTED, hashed="result")
            began = time.thread_time()
            for at in range(0, len(raw), JSON_SCAN_STEP_BYTES):
                scanner.feed(raw[at : at + JSON_SCAN_STEP_BYTES])
            best = min(best, time.thread_time() - began)
            assert scanner.finish() is ScanState.COMPLETE
            assert scanner.found["result", "isError"] is True
        return best

    small, large = cost_s(2**14), cost_s(2**17)
    print(f"{kind}: {large / 2**17 * 1e9:.0f} ns a byte")
    assert large < 8 * small * 3 + 0.02
    tracemalloc.start()
    try:
        cost_s(2**17)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_random_slices_of_a_large_answer_agree_with_json() -> None:
    seed = int(os.environ.get("TGA_TEST_SEED", "0")) or random.randrange(2**32)
    print(f"TGA_TEST_SEED={seed}")
    chance = random.Random(seed)
    content = [{"type": "text", "text": "x" * chance.randrange(3_000), "n": [chance.random()] * 50} for _ in range(200)]
    document = {"jsonrpc": "2.0", "id": 5, "result": {"content": content, "isError": chance.random() < 0.5}}
    raw = json.dumps(document, indent=chance.choice([None, 2])).encode()
    scanner = scanned(raw, [chance.randrange(len(raw)) for _ in range(1_000)])
    assert scanner.state is ScanState.COMPLETE
    assert scanner.found["result", "isError"] is document["result"]["isError"]  # type: ignore[index]
