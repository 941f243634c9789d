"""A signature that a person brings along with a decision or an answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints, ValidationError

from app.core.errors import InputMalformed, SchemaViolation
from app.domain.ledger.documents import Signature

SignatureText = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]


def own_signature(
    signature: str | None, key_id: str | None, at: str | None, name_of_at: str
) -> tuple[Signature, str] | None:
    """The signature, and when it was given; None without one. InputMalformed where a part is missing."""
    given = [one is not None for one in (signature, key_id, at)]
    if not any(given):
        return None
    if signature is None or key_id is None or at is None:
        raise InputMalformed(
            "an incomplete signature",
            expected=f"signature, key_id and {name_of_at} together, or none of them",
            found=f"{sum(given)} of the three",
        )
    try:
        return Signature(algorithm="Ed25519", key_id=key_id, value=signature), at
    except ValidationError:
        raise SchemaViolation("the body at /signature", expected="an Ed25519 signature in base64") from None
