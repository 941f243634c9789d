"""Who is calling: an API key or a token becomes a principal, or is refused without a word about why."""

from __future__ import annotations

import hmac
from typing import Final, NoReturn, Protocol

from app.core.errors import Unauthenticated
from app.core.limits import CREDENTIAL_CHARS_MAX
from app.domain.identity import API_KEY_PREFIX, ApiKeyLookup, PresentedKey, Principal, StoredKey, parse_api_key

_SCHEME: Final = "bearer"
_NOBODYS_DIGEST: Final = bytes(32)  # no secret is known that hashes to this


class Tokens(Protocol):
    """Verifies bearer tokens that are not API keys."""

    async def verify(self, token: str) -> Principal | None: ...


class Authenticator:
    """Turns the Authorization header into a principal.

    One error for every cause, always the same. A key that does not exist and one that came with a wrong secret go the
    same way: a comparison, one look at the database, a comparison; a refusal never comes from memory alone.
    """

    def __init__(self, keys: ApiKeyLookup, tokens: Tokens | None = None) -> None:
        self._keys = keys
        self._tokens = tokens

    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of a valid credential, else Unauthenticated; StoreUnavailable when keys cannot be read.

        Keys that do not exist never make one that does wait for more than the query under way: look-ups go to the
        store many at a time.
        """
        if authorization is None or len(authorization) > CREDENTIAL_CHARS_MAX:
            _refuse()
        scheme, _, credential = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            _refuse()
        credential = credential.strip(" ")
        if credential.startswith(API_KEY_PREFIX):
            return await self._authenticate_key(credential)
        principal = None if self._tokens is None else await self._tokens.verify(credential)
        if principal is None:
            _refuse()
        return principal

    async def _authenticate_key(self, text: str) -> Principal:
        presented = parse_api_key(text)
        if presented is None:
            _refuse()
        key = self._keys.cached_key(presented.key_id)
        if not _fits(key, presented):
            # Also when a remembered key's secret was wrong: a quicker refusal would tell that the key exists.
            key = await self._keys.load_key(presented.key_id)
            if not _fits(key, presented):
                _refuse()
        if key is None or not key.is_valid:
            _refuse()
        return key.principal


def _fits(key: StoredKey | None, presented: PresentedKey) -> bool:
    """Whether the secret is the key's; compared in constant time also when there is no key."""
    expected = _NOBODYS_DIGEST if key is None else key.secret_sha256
    return hmac.compare_digest(expected, presented.secret_sha256) and key is not None


def _refuse() -> NoReturn:
    raise Unauthenticated("the request is not authenticated") from None
