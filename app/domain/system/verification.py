"""A system stream's own checks in the verification walk: what it vouches for, and what it says of erased streams.

Steps by the numbers of app/domain/ledger/verification.py. In step 6 a key or policy stands under its own name, a key
is remembered with its place in the tree, an erasure is told to the walk. In step 10 an erasure is compared with the
stream that it erased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from app.core.errors import RecoveryFailed, SignatureInvalid, TgaError
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.checks import AnyRecord, Erased, KindChecks, ReferredBlob, Standing, StreamChecks, Walking
from app.domain.ledger.stored import StoredEntry, StoredErasure, StoredStream
from app.domain.system.decision_signer import Signed, verify_decision_signature
from app.domain.system.documents import SYSTEM, Erasure, LogEpoch, ProcedureRegistration, SigningKey, SystemDocument
from app.domain.system.log import SYSTEM_DOCUMENTS, KnownKey, verify_epoch, verify_names

_KEY_TYPE: Final = b'"signing_key"'
SIGNED: Final = b'"signature":{'  # what rests on the order of the tree: the key was announced before


class _Announcement(NamedTuple):
    leaf_index: int | None  # None: it has no place in the tree yet
    key: KnownKey


class SigningKeys:
    """Signing keys by tenant, each with what system streams said of it, in that order."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], list[_Announcement]] = {}

    def add(self, tenant: str, key_id: str, key: KnownKey, *, leaf_index: int | None = None) -> None:
        self._said.setdefault((tenant, key_id), []).append(_Announcement(leaf_index, key))

    def find(self, tenant: str, key_id: str, *, before: int | None = None) -> KnownKey | None:
        """A gateway's, which speaks for all tenants and cannot be taken from it by registering it; or the tenant's.

        `before`: only what was said before this place in the tree counts. None: the place is not known, or newer than
        the tree; all that was said counts.
        """
        gateway = self._last(DEFAULT_TENANT, key_id, before)
        if gateway is not None and gateway.principal_id is None:
            return gateway
        return self._last(tenant, key_id, before)

    def _last(self, tenant: str, key_id: str, before: int | None) -> KnownKey | None:
        for leaf_index, key in reversed(self._said.get((tenant, key_id), ())):
            if before is None or (leaf_index is not None and leaf_index < before):
                return key
        return None


def verify_signature_of(document: Signed, keys: SigningKeys, tenant: str, row: StoredEntry, walk: Walking) -> None:
    """SignatureInvalid unless the document is signed by a key that a system stream announced before it, for whoever
    speaks in it."""
    if document.signature is None:
        raise SignatureInvalid("the decision is not signed", expected="a signature", found="none")
    key_id = document.signature.key_id
    known = keys.find(tenant, key_id, before=row.leaf_index)
    if known is None:
        since = ", announced after the decision" if keys.find(tenant, key_id) is not None else ""
        raise SignatureInvalid("no system stream knows the key", found=key_id + since)
    verify_decision_signature(document, known)
    walk.report.signatures += 1
    walk.report.signatures_by_retired_keys += known.is_retired


class _SystemStream(StreamChecks):
    def __init__(self, keys: SigningKeys, epochs: dict[str, list[LogEpoch]]) -> None:
        self._keys = keys
        self._epochs = epochs

    def verify(self, record: AnyRecord, row: StoredEntry, walk: Walking) -> None:
        document: SystemDocument | None = record.artifact
        if document is not None:
            verify_names(document)
        if isinstance(document, LogEpoch):
            told = self._epochs.setdefault(document.system_id, [])
            verify_epoch(document, told)
            told.append(document)
        if not walk.is_covered:
            return
        match document:
            case SigningKey():
                self._keys.add(document.system_id, document.key_id, KnownKey.of(document), leaf_index=row.leaf_index)
            case LogEpoch() if document.system_id == DEFAULT_TENANT:
                walk.report.epochs.append(document.told())
            case Erasure():
                walk.note_erasure(_erased(document, record.stream, row.sequence_number))


class SystemKind(KindChecks):
    """Keys, pins, policies and erasures of a tenant, on which the streams of other kinds rest."""

    documents = SYSTEM_DOCUMENTS
    vouches_for_others = True

    def __init__(self, keys: SigningKeys) -> None:
        self._keys = keys
        self._epochs: dict[str, list[LogEpoch]] = {}  # by tenant; the log's are the default one's

    def begin(self, stored: StoredStream | None = None) -> StreamChecks:
        return _SystemStream(self._keys, self._epochs)

    def blobs_in(self, record: AnyRecord) -> Iterable[ReferredBlob]:
        source = record.artifact.program_source if isinstance(record.artifact, ProcedureRegistration) else None
        if source is not None:
            yield ReferredBlob(source.sha256, source.size_bytes)
            for file in source.files:
                yield ReferredBlob(file.sha256, file.size_bytes)

    def rests_on_order(self, row: StoredEntry) -> bool:
        return row.entry is not None and _KEY_TYPE in row.entry

    def may_withhold(self, stream: str, *, tenant: str) -> bool:
        return SYSTEM.identity_of(stream) != tenant

    def erasure_errors(self, erasure: StoredErasure, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        """Payloads may be gone only if a system stream says so, of exactly this stream as it stands."""
        try:
            if erasure.erasure is None:
                raise RecoveryFailed(
                    "the erasure is not on the record",
                    expected=f"{erasure.system_stream}, entry {erasure.sequence_number}",
                )
            said = Erasure.from_bytes(erasure.erasure)
            expected = (at.stream, at.head.sequence_number, at.head.entry_digest)
            found = (said.erased_stream, said.last_sequence_number, said.last_entry_digest)
            if found != expected:
                raise RecoveryFailed("the erasure is of something else", expected=expected, found=found)
            if at.is_sound and said.folded_payloads() != at.payloads:
                raise RecoveryFailed(
                    "the erasure names other payloads",
                    expected=at.artifact_digests or at.payloads,
                    found=said.artifact_digests or said.payloads_digest,
                )
            tenant = None if stored.summary is None else stored.summary.tenant
            if tenant is not None and erasure.system_stream != SYSTEM.stream(tenant):
                raise RecoveryFailed(
                    "another tenant's system stream has the erasure",
                    expected=SYSTEM.stream(tenant),
                    found=erasure.system_stream,
                )
            _verify_erased_claim(stored, said, erasure.claim_salt)
        except TgaError as error:
            yield error


def _verify_erased_claim(stored: StoredStream, erasure: Erasure, salt: bytes | None) -> None:
    """I2: the request that made the claim is gone, but the erasure says what the claim is."""
    if erasure.claim is not None:
        erasure.claim.verify(stored.claim, salt=salt)
    elif stored.claim is not None or salt is not None:
        raise RecoveryFailed("the erased trace had no claim", expected="none", found="a claim, or its salt")
    if stored.claim is not None and stored.summary is not None:
        expected, found = stored.claim[:2], (stored.summary.server_id, stored.summary.tool_name)
        if found != expected:
            raise RecoveryFailed("the head names another tool than the claim", expected=expected, found=found)


def _erased(erasure: Erasure, system_stream: str, sequence_number: int) -> Erased:
    return Erased(
        erasure.erased_stream,
        erasure.last_sequence_number,
        erasure.last_entry_digest,
        erasure.folded_payloads(),
        None if erasure.claim is None else erasure.claim.key_digest,
        system_stream,
        sequence_number,
    )
