"""Whose signature counts: the gateway's own key, and the keys that supervisors have registered on the system stream."""

from __future__ import annotations

from base64 import b64encode
from typing import Protocol

from app.core.ed25519 import is_usable_public_key, key_id_of, verify_signature
from app.core.errors import AccessNotFound, AlreadyDecided, SettingInvalid, SignatureInvalid
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.documents import Signature
from app.domain.system.documents import SigningKey, SystemDocument
from app.domain.system.log import KnownKey, SystemLog, SystemState
from app.domain.system.pins import GATEWAY


class Signs(Protocol):
    """The gateway's own key; it never leaves its keyring."""

    @property
    def key_id(self) -> str: ...

    @property
    def public_key_bytes(self) -> bytes: ...

    def sign(self, message: bytes) -> Signature: ...


class Signed(Protocol):
    """A document with a signature in it, by or for the person whose word it is."""

    @property
    def signature(self) -> Signature | None: ...

    @property
    def signer_id(self) -> str:
        """The principal whose word it is."""
        ...

    def signed_bytes(self) -> bytes: ...


class SystemDecisionSigner:
    """The Signatory port. A key counts from its announcement on the system stream on; a retired one signs no more."""

    def __init__(self, system: SystemLog, signs: Signs, clock: Clock) -> None:
        self._system = system
        self._signs = signs
        self._clock = clock

    def sign(self, message: bytes) -> Signature:
        return self._signs.sign(message)

    async def announce(self) -> None:
        """Put the gateway's key on the record, before it signs anything. Several gateways may each have their own."""

        def decide(state: SystemState) -> list[SystemDocument]:
            known = state.keys.get(self._signs.key_id)
            if known is None:
                return [self._document(DEFAULT_TENANT, "announced", self._signs.public_key_bytes, None)]
            if known.is_retired:
                raise SettingInvalid(
                    "the signing key is retired, and signs nothing new",
                    found=self._signs.key_id,
                    remedy="Put the key that follows it into the keys folder, or run `tga keys rotate signing`.",
                )
            return []

        await self._system.append(DEFAULT_TENANT, decide)

    async def retire(self, tenant: str, key_id: str, *, by: str) -> None:
        """The key signs nothing new from here on; what it signed before stays good."""

        def decide(state: SystemState) -> list[SystemDocument]:
            known = state.keys.get(key_id)
            if known is None:
                raise AccessNotFound("no such signing key is registered", found=key_id)
            if known.is_retired:
                return []
            return [self._document(tenant, "retired", known.public_key, known.principal_id, by=by)]

        await self._system.append(tenant, decide)

    async def register(self, tenant: str, principal_id: str, public_key: bytes, *, by: str) -> str:
        """A supervisor's own key counts from here on; returns its id."""
        if not is_usable_public_key(public_key):
            raise SettingInvalid("this is no Ed25519 public key", expected="32 bytes of a key pair")
        key_id = key_id_of(public_key)
        gateways = (await self._system.refresh(DEFAULT_TENANT)).keys.get(key_id)
        if gateways is not None and gateways.principal_id is None:  # it is on the record for everyone to copy
            raise AlreadyDecided("the key is a gateway's own", found=key_id)

        def decide(state: SystemState) -> list[SystemDocument]:
            known = state.keys.get(key_id)
            if known is not None and known.principal_id != principal_id:
                raise AlreadyDecided("the key is registered for another principal", found=key_id)
            if known is not None and not known.is_retired:
                return []
            return [self._document(tenant, "announced", public_key, principal_id, by=by)]

        await self._system.append(tenant, decide)
        return key_id

    async def verify(self, decision: Signed, *, tenant: str) -> None:
        signature = decision.signature
        if signature is None:
            raise SignatureInvalid("the decision is not signed")
        # Read on first: the key may have been retired through another gateway.
        known = (await self._system.refresh(tenant)).keys.get(signature.key_id)
        if known is None or known.is_retired:
            raise SignatureInvalid("the key is not registered, or retired", found=signature.key_id)
        verify_decision_signature(decision, known)

    def _document(
        self, tenant: str, change: str, public_key: bytes, principal_id: str | None, *, by: str = GATEWAY
    ) -> SigningKey:
        return SigningKey.made(
            system_id=tenant,
            recorded_at=self._clock.now(),
            recorded_by=by,
            change=change,
            key_id=key_id_of(public_key),
            algorithm="Ed25519",
            public_key=b64encode(public_key).decode("ascii"),
            principal_id=principal_id,
        )


def verify_decision_signature(decision: Signed, key: KnownKey) -> None:
    """Raise SignatureInvalid unless the decision is signed by this key, and the key may speak for who decided."""
    if key.principal_id not in (None, decision.signer_id):
        raise SignatureInvalid("the key is another principal's", expected=decision.signer_id, found=key.principal_id)
    signature = decision.signature
    if signature is None or not verify_signature(key.public_key, signature, decision.signed_bytes()):
        raise SignatureInvalid("the signature does not fit the decision", found=signature and signature.key_id)
