"""An issuer of tokens for tests: its private keys, its key set, and a real HTTP server that serves it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "tga"


@dataclass(frozen=True)
class JwtFields:
    """The shape of the configuration's `[auth.jwt]`."""

    issuer: str = ISSUER
    audience: str = AUDIENCE
    algorithms: list[str] = field(default_factory=lambda: ["EdDSA", "ES256", "ES384", "RS256", "PS256"])
    jwks_url: str | None = None
    jwks_file: Path | None = None
    principal_claim: str = "sub"
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"


PRIVATE: dict[str, Any] = {
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
}
PRIVATE["PS256"] = PRIVATE["RS256"]


def public_jwk(private: Any, kid: str, **members: Any) -> dict[str, Any]:
    public = private.public_key()
    if isinstance(private, rsa.RSAPrivateKey):
        data = RSAAlgorithm.to_jwk(public, as_dict=True)
    elif isinstance(private, ec.EllipticCurvePrivateKey):
        data = ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        data = OKPAlgorithm.to_jwk(public, as_dict=True)
    data.pop("key_ops", None)
    return {**data, "kid": kid, **members}


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


ALL_KEYS = jwks(*(public_jwk(PRIVATE[name], name.lower()) for name in ("EdDSA", "ES256", "ES384", "RS256")))


def claims(**changes: Any) -> dict[str, Any]:
    """Claims that are accepted; a change to None leaves the claim out."""
    now = int(time.time())
    fields = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 300, "roles": ["agent"], **changes}
    return {name: value for name, value in fields.items() if value is not None}


def token(algorithm: str = "EdDSA", *, kid: str | None = None, private: Any = None, **changes: Any) -> str:
    return jwt.encode(
        claims(**changes), private or PRIVATE[algorithm], algorithm, headers={"kid": kid or algorithm.lower()}
    )


def raw_token(header: Any, payload: Any, signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(payload).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@dataclass
class KeyServer:
    """Serves `body` with `status`; counts what it was asked."""

    url: str = ""
    body: bytes = ALL_KEYS
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0
    asked: int = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        return web.Response(body=self.body, status=self.status, headers=self.headers)

    async def answer_elsewhere(self, _: web.Request) -> web.Response:
        return web.Response(body=self.body)


@asynccontextmanager
async def serve_keys() -> AsyncIterator[KeyServer]:
    keys = KeyServer()
    application = web.Application()
    application.router.add_get("/jwks", keys.answer)
    application.router.add_get("/elsewhere", keys.answer_elsewhere)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    keys.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    try:
        yield keys
    finally:
        await runner.cleanup()
