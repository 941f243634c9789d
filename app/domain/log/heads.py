"""Signed heads of the log: what one must follow from, and who signs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from app.core.ed25519 import is_usable_public_key
from app.core.errors import LogForked, ProofInvalid
from app.core.merkle import Hash, verify_consistency
from app.core.note import TreeHead, VerifierKey, read_note


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A tree head, and the note that says so verbatim. Whose signatures are on it is for its reader to verify."""

    head: TreeHead
    note: str

    @classmethod
    def from_note(cls, note: str) -> SignedHead:
        return cls(TreeHead.from_text(read_note(note)[0]), note)


class HeadSigner(Protocol):
    """Signs heads, and remembers the last one where no database administrator can reach it.

    `after` is what `load_remembered` gave: when that is no longer the last one, ConcurrentExecution.
    """

    @property
    def verifier_key(self) -> VerifierKey: ...

    def load_remembered(self) -> SignedHead | None: ...

    def sign(self, size: int, root: Hash, proof: Sequence[bytes], *, after: SignedHead | None) -> SignedHead:
        """The signed head, remembered durably before this returns; LogForked unless it follows from `after`."""
        ...

    def remember(self, signed: SignedHead, proof: Sequence[bytes], *, after: SignedHead | None) -> None:
        """Another has signed it: nothing that contradicts it is signed here either."""
        ...

    def begin_epoch(self, head: TreeHead, *, after: SignedHead) -> SignedHead:
        """The first head under a new origin, signed and remembered; it continues nothing. For an operator alone."""
        ...

    def is_later_epoch(self, signed: SignedHead, *, after: SignedHead) -> bool:
        """Whether this signer's own key has signed it as a head of a later epoch of the log of `after`."""
        ...

    def has_signed(self, signed: SignedHead) -> bool:
        """Whether a key of this signer, also one that is retired, has signed it."""
        ...


def verify_follows(head: TreeHead, proof: Sequence[bytes], *, after: TreeHead | None) -> None:
    """Raise LogForked unless `proof` shows that the head's tree begins with the tree of the head before it."""
    if after is None:
        return
    if head.size < after.size:
        raise LogForked(
            "the tree is smaller than one that was signed", expected=f"{after.size} leaves", found=f"{head.size} leaves"
        )
    try:
        verify_consistency(old=after.size, new=head.size, old_root=after.root, new_root=head.root, proof=proof)
    except ProofInvalid as error:
        raise LogForked(
            "the tree does not begin with the tree that was signed",
            expected=f"root {after.root.hex()} over the first {after.size} leaves",
            found=error.what,
        ) from None


def fits(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether an Ed25519 signature is by this key over exactly this message; never raises. For `open_note`."""
    try:
        if not is_usable_public_key(public_key):
            return False
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
