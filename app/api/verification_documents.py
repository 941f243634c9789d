"""The shapes of verification, and of signed heads."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from app.api.documents import ListPage, Shape
from app.core.limits import VERIFICATION_LEAVES_MAX
from app.domain.ledger.documents import Sha256, Time

_TIME: Final = "2026-01-01T00:00:00.000Z"
_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_CHECK: Final[dict[str, Any]] = {
    "name": "entries",
    "outcome": "sound",
    "what": "every entry is in its place, and its bytes hash to what the chain says",
}


class CheckItem(Shape):
    name: Literal["entries", "transitions", "artifacts", "signatures", "head_and_claim", "tree", "signed_head"]
    outcome: Literal["sound", "wrong", "not_checked"]
    what: str


class FindingItem(Shape):
    check: str
    code: str
    what: str
    sequence_number: int | None = Field(description="Of the entry that is concerned.")
    expected: str | None
    found: str | None


class VerificationDocument(Shape):
    """Everything of one trace or run, recomputed for this answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "is_sound": True,
                "verified_at": _TIME,
                "entries": 4,
                "is_erased": False,
                "checks": [_CHECK],
                "findings": [],
                "findings_left_out": 0,
                "not_checked": ["whether somebody rewrote entries, tree and heads together"],
                "leaf_index": 12,
                "tree_size": 16,
                "leaves": [5, 6, 7, 12],
            }
        }
    )
    is_sound: bool = Field(description="Nothing that was checked is wrong.")
    verified_at: Time
    entries: int
    is_erased: bool
    checks: list[CheckItem]
    findings: list[FindingItem]
    findings_left_out: int
    not_checked: list[str] = Field(description="What this answer does not show, and who could.")
    leaf_index: int | None = Field(description="Of the last entry; null while no signed head covers it.")
    tree_size: int | None
    leaves: list[int | None] = Field(
        max_length=VERIFICATION_LEAVES_MAX,
        description="Of the first entries, in their order; null while no signed head covers one.",
    )


class HeadItem(Shape):
    size: int
    root: Sha256
    signed_at: Time
    note: str = Field(description="The signed note itself (C2SP tlog-checkpoint).")


class HeadPage(ListPage):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "items": [{"size": 16, "root": _DIGEST, "signed_at": _TIME, "note": "tga.example/log\\n16\\n…"}],
                "next": None,
            }
        }
    )
    items: list[HeadItem]


_LOG_VERIFICATION: Final[dict[str, Any]] = {
    "verification_id": "019b76da-a800-7000-8000-000000000001",
    "started_by": "ines",
    "started_at": _TIME,
    "ended_at": _TIME,
    "state": "sound",
    "phase": "over",
    "streams_total": 12061,
    "streams": 12061,
    "entries": 48213,
    "findings_total": 0,
    "tree": {
        "kind": "sound",
        "what": "",
        "tree_size": 48213,
        "heads_fit": 31402,
        "trusted_size": 48213,
        "trusted_until": _TIME,
        "broken_size": None,
        "entries_without_leaf": 2,
        "evidence": [],
    },
    "error": None,
    "findings": [],
}


class LogFinding(Shape):
    stream: str | None
    sequence_number: int | None
    code: str
    what: str
    expected: str | None
    found: str | None


class TreeDiagnosis(Shape):
    kind: str = Field(description="sound, or what happened to the log.")
    what: str
    tree_size: int
    heads_fit: int
    trusted_size: int = Field(description="Up to which size of the tree it can be trusted.")
    trusted_until: str | None
    broken_size: int | None = Field(description="The smallest signed head that does not fit.")
    entries_without_leaf: int
    evidence: list[str]


class LogVerificationDocument(Shape):
    """As far as it has come. Not compared: what the signer remembers, and heads that were kept elsewhere."""

    model_config = ConfigDict(json_schema_extra={"example": _LOG_VERIFICATION})
    verification_id: str
    started_by: str
    started_at: Time
    ended_at: Time | None
    state: Literal["running", "sound", "wrong", "stopped", "failed"]
    phase: Literal["streams", "tree", "over"]
    streams_total: int
    streams: int
    entries: int
    findings_total: int
    tree: TreeDiagnosis | None
    error: str | None
    findings: list[LogFinding] = Field(description="The first hundred.")


class LogVerificationPage(ListPage):
    model_config = ConfigDict(json_schema_extra={"example": {"items": [_LOG_VERIFICATION], "next": None}})
    items: list[LogVerificationDocument]


class LogVerified(Shape):
    state: Literal["sound", "wrong"]
    ended_at: Time
    started_by: str | None = Field(description="Null for a verification that another tenant started.")
    findings_total: int
    tree_size: int | None
    trusted_size: int | None = Field(description="Up to which size of the tree it can be trusted.")
    broken_size: int | None = Field(description="The smallest signed head that does not fit.")


class LogStanding(Shape):
    """The last verification of the whole log that came to its end, by whichever gateway and tenant."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "verified": {
                    "state": "sound",
                    "ended_at": _TIME,
                    "started_by": "ines",
                    "findings_total": 0,
                    "tree_size": 48213,
                    "trusted_size": 48213,
                    "broken_size": None,
                }
            }
        }
    )
    verified: LogVerified | None = Field(description="Null when the log was never verified so.")
