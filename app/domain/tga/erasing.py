"""What must hold of a trace before its payloads are erased: afterwards they cannot be compared any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import RecoveryFailed
from app.domain.ledger.checks import AnyRecord
from app.domain.ledger.erasing import ErasableKind
from app.domain.ledger.plans import Claim
from app.domain.tga.idempotency import claim_errors
from app.domain.tga.replay import TRACE_DOCUMENTS, fold, head_of


def _verify(records: Sequence[AnyRecord], claim: Claim | None, effect: Digest | None) -> Head:
    state = fold(records)
    if state is None:
        raise RecoveryFailed("the log folds to nothing")
    for error in claim_errors(claim, effect, records=records, state=state):
        raise error
    return head_of(state)


ERASABLE_TRACES: Final = ErasableKind(TRACE_DOCUMENTS, _verify)
