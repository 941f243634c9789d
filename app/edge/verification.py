"""What can be said of a trace or run by recomputing all of it here and now: each check by itself, and what was not
checked. For the API and the console; `tga verify` judges by the same walk.

The checks, in their order:

1. entries: each is there, in its place, and its bytes hash to what the chain says
2. transitions: each is one that the table admits, and binds to the artifact before it
3. artifacts: each hashes to what its entry commits to, follows its schema, and says what the stream folds to
4. signatures: decisions and answers are signed by keys that were announced before
5. head and claim: what is kept beside the entries says the same
6. tree: the last entry is the leaf that it should be, by a proof that is verified here, and no entry was left out
7. signed head: the head over that tree is signed with the log's key
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from app.core.errors import (
    CheckpointMissing,
    ChecksumMismatch,
    InvalidTransition,
    SequenceGap,
    SignatureInvalid,
    TgaError,
)
from app.core.limits import VERIFICATION_FINDINGS_MAX, VERIFICATION_LEAVES_MAX
from app.core.merkle import leaf_hash, verify_inclusion
from app.core.note import open_note
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.log.epochs import keys_for
from app.domain.log.forensics import Unlogged, find_unlogged
from app.domain.log.heads import SignedHead, fits
from app.domain.runs.verification import stream_checks
from app.edge.services import Services
from app.postgres.reader import open_reader
from app.postgres.tree import PostgresTree
from app.postgres.tree_reader import open_tree_reader

Outcome = Literal["sound", "wrong", "not_checked"]
CheckName = Literal["entries", "transitions", "artifacts", "signatures", "head_and_claim", "tree", "signed_head"]

_CHECKED: Final[dict[CheckName, str]] = {
    "entries": "every entry is in its place, and its bytes hash to what the chain says",
    "transitions": "every state follows from the one before by the table",
    "artifacts": "every artifact is the one that its entry commits to, and follows its schema",
    "signatures": "signed decisions and answers, by keys that were announced before",
    "head_and_claim": "head, claim, checkpoints and what rests beside the entries say the same",
    "tree": "the last entry is a leaf of the tree, by a proof that was verified here, and no entry was left out",
    "signed_head": "the head over that tree is signed with the log's key",
}
_ALWAYS_UNCHECKED: Final = (
    "whether somebody rewrote entries, tree and heads together and holds the log's key: compare with a head that was "
    "kept elsewhere (tga verify --all --head FILE --key PUB)",
    "whether secret arguments are those that their commitments say: only who has the sealing key can tell (tga verify)",
    "other streams, but for those of the system that this one rests on",
)
_CHECK_OF: Final[dict[type[TgaError], CheckName]] = {
    SequenceGap: "entries",
    InvalidTransition: "transitions",
    SignatureInvalid: "signatures",
    CheckpointMissing: "head_and_claim",
}


@dataclass(frozen=True, slots=True)
class Check:
    name: CheckName
    outcome: Outcome
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    check: CheckName
    code: str
    what: str
    sequence_number: int | None
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class Verification:
    """`is_sound`: nothing that was checked is wrong. `leaf_index` of the last entry in a tree of `tree_size`;
    `leaves` of the first entries, in their order, None where the newest signed head does not cover one."""

    is_sound: bool
    verified_at: str
    entries: int
    is_erased: bool
    checks: list[Check]
    findings: list[Finding]
    findings_left_out: int
    not_checked: list[str]
    leaf_index: int | None
    tree_size: int | None
    leaves: list[int | None]


async def verify_one(services: Services, stream: str) -> Verification:
    """Recompute one stream. The caller has verified that its reader may see it."""
    report, findings, left_out = Report(), list[Finding](), 0
    outcomes: dict[CheckName, Outcome] = dict.fromkeys(_CHECKED, "sound")

    def note(error: TgaError, check: CheckName | None = None) -> None:
        nonlocal left_out
        name = check or _check_of(error)
        outcomes[name] = "wrong"
        if len(findings) >= VERIFICATION_FINDINGS_MAX:
            left_out += 1
            return
        expected, found = (None if one is None else str(one) for one in (error.expected, error.found))
        findings.append(Finding(name, error.code, error.what, error.sequence_number, expected, found))

    async with open_reader(services.sessions, stream=stream) as reader:
        async for error in verify_ledger(reader, stream_checks(), report):
            if error.stream in (None, stream):
                note(error)
            else:  # another tenant's system stream is not told of here
                note(type(error)("what this stream rests on is wrong"), "signatures")
    async with open_tree_reader(services.sessions) as leaves:
        async for error in find_unlogged(leaves, Unlogged(), stream):
            note(error, "tree")
    not_checked = list(_ALWAYS_UNCHECKED)
    leaf_index = tree_size = None
    place = await _place(services, stream)
    if place is None:
        outcomes["tree"] = outcomes["tree"] if outcomes["tree"] == "wrong" else "not_checked"
        outcomes["signed_head"] = "not_checked"
        not_checked.insert(0, "tree and signed head: no head covers the last entry yet; ask again in a second")
    else:
        head, leaf_index = place.signed.head, place.index
        tree_size = head.size
        try:
            proof = await place.tree.inclusion_proof(leaf_index, tree_size)
            verify_inclusion(leaf_hash(place.entry), index=leaf_index, size=tree_size, proof=proof, root=head.root)
        except TgaError as error:
            note(error, "tree")
        try:
            own = services.log.verifier_key
            open_note(place.signed.note, [own, *keys_for(head.origin, [own])], fits)
        except TgaError as error:
            note(error, "signed_head")
    if report.signatures == 0 and outcomes["signatures"] == "sound":
        outcomes["signatures"] = "not_checked"
        not_checked.insert(0, "signatures: this stream has none")
    if report.erased_streams:
        outcomes["artifacts"] = "wrong" if outcomes["artifacts"] == "wrong" else "not_checked"
        not_checked.insert(0, "artifacts: they were erased, on the record; their digests stand")
    elif report.payloads_erased:
        not_checked.insert(0, "what some artifacts said: they were erased, on the record; their digests stand")
    return Verification(
        is_sound="wrong" not in outcomes.values(),
        verified_at=services.clock.now(),
        entries=report.entries,
        is_erased=bool(report.erased_streams),
        checks=[Check(name, outcome, _CHECKED[name]) for name, outcome in outcomes.items()],
        findings=findings,
        findings_left_out=left_out,
        not_checked=not_checked,
        leaf_index=leaf_index,
        tree_size=tree_size,
        leaves=await _leaves(services, stream),
    )


@dataclass(frozen=True, slots=True)
class _Proven:
    tree: PostgresTree
    index: int
    signed: SignedHead
    entry: bytes


async def _place(services: Services, stream: str) -> _Proven | None:
    """Where the last entry stands under the newest signed head; None while none covers it."""
    tree = PostgresTree(services.sessions)
    last = await tree.last_sequence_number(stream)
    place = None if last is None else await tree.place_of(stream, last)
    if last is None or place is None:
        return None
    return _Proven(tree, place.index, place.signed, await tree.entry_bytes(stream, last))


async def _leaves(services: Services, stream: str) -> list[int | None]:
    tree = PostgresTree(services.sessions)
    told_of = min(await tree.last_sequence_number(stream) or 0, VERIFICATION_LEAVES_MAX)
    found = await tree.leaves_of(stream, entries_max=told_of)
    return [found.get(number) for number in range(1, told_of + 1)]


def _check_of(error: TgaError) -> CheckName:
    for kind, name in _CHECK_OF.items():
        if isinstance(error, kind):
            return name
    if isinstance(error, ChecksumMismatch):
        return "artifacts" if "artifact" in error.what else "entries"
    return "artifacts" if error.sequence_number is not None else "head_and_claim"
