"""The public keys of a token issuer (RFC 7517): read from a URL or a file, kept, and read again when they change."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import jwt
from yarl import URL

from app.connectors.http_client import HttpPool, Origin
from app.core.canonical import parse_object
from app.core.errors import InputMalformed, InputTooLarge, SettingInvalid, TgaError
from app.core.limits import JWKS_AGE_MAX_MS, JWKS_BYTES_MAX, JWKS_KEYS_MAX, JWKS_REFRESH_EVERY_MS, JWKS_TIMEOUT_MS

log = logging.getLogger(__name__)

# Which algorithms a key of a type and curve may verify. Shared secrets (HS*) and `none` prove no signer: not listed.
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_FITTING: Final[Mapping[tuple[str, str | None], tuple[str, ...]]] = {
    ("OKP", "Ed25519"): ("EdDSA",),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("RSA", None): _RSA,
}
ALGORITHMS: Final = frozenset(name for names in _FITTING.values() for name in names)
_RSA_BITS_MIN, _RSA_BITS_MAX = 2_048, 8_192
_PRIVATE_MEMBERS: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "k"})

Verifying = Mapping[tuple[str, str], jwt.PyJWK]
"""Keys by their id and the algorithm that they verify."""


class KeySource(Protocol):
    async def find(self, kid: str, algorithm: str) -> jwt.PyJWK | None:
        """The issuer's key of this id for this algorithm. Never raises."""
        ...

    async def start(self) -> None:
        """Read the keys for the first time; SettingInvalid for what only a person can set right."""
        ...

    async def close(self) -> None: ...


def parse_jwks(raw: bytes, algorithms: Collection[str]) -> Verifying:
    """The keys that can verify one of `algorithms`; InputMalformed or InputTooLarge if it is no key set.

    A key without an id, for encryption, weak, of another type, or with its private half is left out, as RFC 7517
    section 5 asks of what is not understood.
    """
    listed = parse_object(raw, bytes_max=JWKS_BYTES_MAX).get("keys")
    if not isinstance(listed, list):
        raise InputMalformed("not a JSON Web Key Set", expected="a member `keys`, a list")
    if len(listed) > JWKS_KEYS_MAX:
        raise InputTooLarge("too many keys in the set", expected=f"at most {JWKS_KEYS_MAX}", found=len(listed))
    found: dict[tuple[str, str], jwt.PyJWK] = {}
    for data in listed:
        if isinstance(data, dict):
            for algorithm, key in _usable(data, algorithms):
                found.setdefault((key.key_id or "", algorithm), key)
    return found


def _usable(data: dict[str, Any], algorithms: Collection[str]) -> list[tuple[str, jwt.PyJWK]]:
    kid, operations = data.get("kid"), data.get("key_ops", ["verify"])
    if not isinstance(kid, str) or not kid or data.get("use", "sig") != "sig" or not _PRIVATE_MEMBERS.isdisjoint(data):
        return []
    if not isinstance(operations, list) or "verify" not in operations:
        return []
    kty, crv, alg = data.get("kty"), data.get("crv"), data.get("alg")
    fitting = _FITTING.get((str(kty), None if kty == "RSA" else str(crv)), ())
    usable = []
    for algorithm in fitting:
        if algorithm not in algorithms or alg not in (None, algorithm):
            continue
        try:
            key = jwt.PyJWK(data, algorithm)
        except Exception as error:  # numbers that are no point of the curve, and whatever else cryptography finds
            log.warning("a key of the issuer cannot be used: %s", type(error).__name__)
            return []
        if algorithm in _RSA and not _RSA_BITS_MIN <= key.key.key_size <= _RSA_BITS_MAX:
            log.warning("an RSA key of the issuer is too short or too long: %d bits", key.key.key_size)
            return []
        usable.append((algorithm, key))
    return usable


class JwksFile:
    """Keys in a file. Read again when it has changed; a file that cannot be read leaves the keys as they were."""

    def __init__(self, path: Path, algorithms: Collection[str]) -> None:
        self._path = path
        self._algorithms = algorithms
        self._keys: Verifying = {}
        self._seen: tuple[int, ...] | None = None

    async def start(self) -> None:
        try:
            self._read()
        except (TgaError, OSError) as error:
            raise SettingInvalid(
                "the file of the issuer's keys cannot be used", found=f"{self._path}: {error}"
            ) from None

    async def find(self, kid: str, algorithm: str) -> jwt.PyJWK | None:
        try:
            self._read()
        except (TgaError, OSError) as error:
            log.warning("the issuer's keys stay as they were: %s", error)
        return self._keys.get((kid, algorithm))

    async def close(self) -> None:
        pass

    def _read(self) -> None:
        # A stat and, rarely, a small local file: quicker than handing either to another thread.
        stat = os.stat(self._path)
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns)
        if seen == self._seen:
            return
        self._seen = seen  # a bad file is complained about once, not with each token
        with self._path.open("rb") as file:
            self._keys = parse_jwks(file.read(JWKS_BYTES_MAX + 1), self._algorithms)


class JwksUrl:
    """Keys at a URL. Fetched when first needed, when a token names a key that is not known, and when they are old.

    At most one fetch in JWKS_REFRESH_EVERY_MS: strangers cannot make the gateway press the issuer, and a
    new key may have to wait that long. A fetch that fails leaves the keys as they were, however old: an issuer that is
    down locks nobody out, and a key that it has withdrawn meanwhile still counts until it can be reached again.
    """

    def __init__(self, url: str, algorithms: Collection[str]) -> None:
        self._url = safe_url(url)
        self._algorithms = algorithms
        self._keys: Verifying = {}
        self._asked_at_s: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._refreshed()  # an issuer that is down now may be up when the first token comes

    async def find(self, kid: str, algorithm: str) -> jwt.PyJWK | None:
        key = self._keys.get((kid, algorithm))
        if key is None:
            await self._refreshed()
            key = self._keys.get((kid, algorithm))
        elif self._age_ms() > JWKS_AGE_MAX_MS:
            self._refresh()  # in the background: the key is good until told otherwise
        return key

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    async def _refreshed(self) -> None:
        self._refresh()
        if self._fetching is not None:
            # Shielded: a caller that goes away must not end the fetch for the others.
            await asyncio.wait([self._fetching])

    def _refresh(self) -> None:
        if self._fetching is None and self._age_ms() >= JWKS_REFRESH_EVERY_MS:
            self._asked_at_s = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch(), name="fetch the issuer's keys")

    def _age_ms(self) -> float:
        return float("inf") if self._asked_at_s is None else (time.monotonic() - self._asked_at_s) * 1000

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(JWKS_TIMEOUT_MS / 1000):
                self._keys = parse_jwks(await _get(self._url), self._algorithms)
        except Exception as error:  # whatever the issuer sent, the keys that are known still count
            log.warning("the issuer's keys stay as they were: %s: %s", type(error).__name__, error)
        finally:
            self._fetching = None


async def _get(url: URL) -> bytes:
    """At most JWKS_BYTES_MAX + 1 bytes, so that the parser refuses what is longer."""
    status, body = await ask_issuer("GET", url, bytes_max=JWKS_BYTES_MAX)
    if status != 200:
        raise InputMalformed("the issuer did not send its keys", expected="status 200", found=status)
    return body


async def ask_issuer(
    method: str, url: URL, *, bytes_max: int, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> tuple[int, bytes]:
    """The status, and at most `bytes_max` + 1 bytes of the answer. No redirects; the caller keeps the time."""
    pool = HttpPool(keeps_alive=False)
    try:
        origin = Origin.of(url)
        async with pool.request(method, origin, url.raw_path_qs, headers=headers, body=body) as answer:
            found = bytearray()
            while len(found) <= bytes_max and (chunk := await answer.read_some()):
                found += chunk
            return answer.status, bytes(found[: bytes_max + 1])
    finally:
        await pool.close()


def safe_url(url: str, what: str = "jwks_url is not a safe place for keys") -> URL:
    """The address, or SettingInvalid: an attacker who answers in the issuer's place can be every principal."""
    try:
        parsed = URL(url)
        host = parsed.host or ""
        is_fit = parsed.port is not None and parsed.user is None
    except ValueError:
        parsed, host, is_fit = URL(), "", False
    is_safe = parsed.scheme == "https" or (parsed.scheme == "http" and _is_this_machine(host))
    if not host or not is_fit or not is_safe:
        raise SettingInvalid(what, expected="https://, or http:// to this machine")
    return parsed


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
