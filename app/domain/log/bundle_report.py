"""What the verification of a bundle has checked and found, and what no bundle of its sort can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from app.core.errors import TgaError
from app.domain.ledger.checks import Report
from app.domain.log.bundle import Manifest
from app.domain.log.bundled_blobs import BlobReport


@dataclass(slots=True)
class AfterHead:
    """What stands after the covered entries, and what is wrong with it; at most BUNDLE_FINDINGS_MAX findings."""

    entries: int = 0
    findings: list[TgaError] = field(default_factory=list)


@dataclass(slots=True)
class BundleReport:
    """What was checked and found. `findings` counts those about the bundle and its covered entries; `after_head` has
    its own. `unknown`: what this bundle cannot show, in plain words."""

    manifest: Manifest | None = None
    streams: Report = field(default_factory=Report)
    leaves: int = 0
    heads: int = 0
    heads_signed: int = 0
    findings: int = 0
    after_head: AfterHead = field(default_factory=AfterHead)
    blobs: BlobReport = field(default_factory=BlobReport)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong anywhere. It says nothing about what stands after the head but that it hangs together."""
        return self.manifest is not None and self.findings == 0 and not self.after_head.findings


def unknown_of(report: BundleReport, manifest: Manifest) -> Iterator[str]:
    """What this bundle cannot show, in plain words."""
    yield (
        f"What was appended after the head of size {manifest.tree_size}, and whether a newer head exists: "
        "compare with a head from another source."
    )
    if not manifest.complete:
        yield "Whether more traces fit the filter, or a trace has more entries: a partial bundle cannot show that."
    if report.after_head.entries:
        yield (
            f"Whether what stands after the head ({report.after_head.entries} system entries) is genuine: no signature "
            "covers it, and nothing above rests on it."
        )
    if report.streams.payloads_withheld:
        yield (
            f"What {report.streams.payloads_withheld} system entries of other tenants than {manifest.filter.tenant} "
            "say: their digests stand, their artifacts are not in the bundle."
        )
    if report.streams.references_unknown:
        yield (
            f"Whether {report.streams.references_unknown} answers in runs are what tools and children answered: their "
            "streams are not in the bundle."
        )
    if report.streams.runs_unfolded:
        yield (
            f"What {report.streams.runs_unfolded} forks go on from: their sources are not in the bundle, or erased. "
            "Links and digests of the forks were compared, their journals were not folded."
        )
    if report.blobs.unchecked:
        yield (
            f"Whether {report.blobs.unchecked} blobs to which entries refer are still there, and what they hold: the "
            "bundle was exported without blobs. Their digests stand in the entries."
        )
    if report.blobs.sealed:
        yield (
            f"What {report.blobs.sealed} sealed values are: their sealed bytes are those that the entries refer to; "
            "only the gateway's sealing key opens them."
        )
    if report.streams.signatures_by_retired_keys:
        yield (
            f"Why {report.streams.signatures_by_retired_keys} decisions are signed by keys that were retired before "
            "them: a gateway takes such a decision only if both happen at the same moment."
        )
    if report.streams.payloads_erased:
        yield (
            f"{report.streams.payloads_erased} payloads were erased: their digests stand, what they said is gone, and "
            "with it which blobs they alone referred to."
        )
    if report.heads > report.heads_signed:
        yield (
            f"{report.heads - report.heads_signed} heads are signed by keys that were not given: their roots were "
            "compared, their signatures were not."
        )
    yield "Whether everything that happened was recorded, and whether what tools answered is true."
