"""A small OpenID provider for tests: real HTTP, real keys, real codes that are taken once, PKCE; and hostile on demand.

In a process of its own: `python -m tests.access.provider --client ID --secret SECRET --redirect URI` prints its
address. What it does wrong is set by `POST /control` with a JSON object of the fields of `Behaviour`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import html
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus, urlencode

import jwt
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.access.issuer import jwks, public_jwk, raw_token

_FOREIGN = ec.generate_private_key(ec.SECP256R1())


@dataclass
class Behaviour:
    """`claims` replaces claims of the ID token; null leaves one out. `trouble` names what is done wrong."""

    claims: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    discovery: dict[str, Any] = field(default_factory=dict)
    status: int = 200


class Provider:
    """One client, one person. The person agrees to everything at once, unless `asks` is set: then by a form."""

    def __init__(self, client_id: str, secret: str | None, redirect_uris: list[str], *, asks: bool = False) -> None:
        self.client_id, self.secret, self.redirect_uris, self.asks = client_id, secret, redirect_uris, asks
        self.url = ""
        self.behaviour = Behaviour()
        self.codes: dict[str, dict[str, str]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.rotate()

    def rotate(self) -> None:
        """A new key; the old one is published no more."""
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.kid = secrets.token_hex(4)
        self.signs_with = (self.key, self.kid)

    def application(self) -> web.Application:
        made = web.Application()
        made.router.add_get("/.well-known/openid-configuration", self.discovery)
        made.router.add_get("/keys", self.keys)
        made.router.add_get("/authorize", self.authorize)
        made.router.add_post("/token", self.token)
        made.router.add_get("/end", self.end)
        made.router.add_post("/control", self.control)
        made.router.add_get("/asked", self.tell)
        made.router.add_get("/link", self.link)
        return made

    async def discovery(self, _: web.Request) -> web.Response:
        if self.behaviour.status != 200:
            return web.Response(status=self.behaviour.status)
        said = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize?tenant=a",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "end_session_endpoint": f"{self.url}/end",
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            **self.behaviour.discovery,
        }
        return web.json_response({name: value for name, value in said.items() if value is not None})

    async def keys(self, _: web.Request) -> web.Response:
        return web.Response(body=jwks(public_jwk(self.key, self.kid, use="sig", alg="RS256")))

    async def authorize(self, request: web.Request) -> web.Response:
        asked = dict(request.query)
        self.asked.append(("authorize", asked))
        assert asked["client_id"] == self.client_id, "another client"
        assert asked["redirect_uri"] in self.redirect_uris, "not a registered address"
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert asked["tenant"] == "a", "the endpoint's own query was lost"
        if self.behaviour.trouble == "denies":
            answer = {"error": "access_denied", "error_description": "<b>no</b>", "state": asked["state"]}
        else:
            code = secrets.token_urlsafe(16)
            self.codes[code] = asked
            answer = {"code": code, "state": asked["state"]}
        at = f"{asked['redirect_uri']}?{urlencode(answer)}"
        if self.asks:
            return web.Response(
                text='<!doctype html><title>Provider</title><link rel="icon" href="data:,">'
                f'<a id="agree" href="{html.escape(at)}">I am Ada</a>',
                content_type="text/html",
            )
        return web.Response(status=302, headers={"Location": at})

    async def token(self, request: web.Request) -> web.Response:
        given = {name: str(value) for name, value in (await request.post()).items()}
        self.asked.append(("token", given))
        if self.behaviour.trouble == "silent":
            await asyncio.sleep(3600)
        if self.behaviour.trouble == "broken":
            return web.Response(status=500, text="oops")
        if not self._is_client(request, given):
            return web.json_response({"error": "invalid_client"}, status=401)
        asked = self.codes.pop(given["code"], None)  # taken once
        proof = base64.urlsafe_b64encode(hashlib.sha256(given["code_verifier"].encode()).digest()).rstrip(b"=")
        if asked is None or proof.decode() != asked["code_challenge"] or given["redirect_uri"] != asked["redirect_uri"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        return web.json_response({"access_token": "x", "token_type": "Bearer", "id_token": self._id_token(asked)})

    async def end(self, request: web.Request) -> web.Response:
        self.asked.append(("end", dict(request.query)))
        return web.Response(status=302, headers={"Location": request.query["post_logout_redirect_uri"]})

    async def control(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.pop("rotate", False):
            self.rotate()
        self.behaviour = Behaviour(**asked)
        return web.json_response({})

    async def tell(self, _: web.Request) -> web.Response:
        return web.json_response(self.asked)

    async def link(self, request: web.Request) -> web.Response:
        """A page of another site that leads to the gateway, as a message in a chat does."""
        return web.Response(
            text='<!doctype html><title>Chat</title><link rel="icon" href="data:,">'
            f'<a href="{html.escape(request.query["to"])}">Open</a>',
            content_type="text/html",
        )

    def _is_client(self, request: web.Request, given: dict[str, str]) -> bool:
        if self.secret is None:
            return given.get("client_id") == self.client_id
        if "Authorization" not in request.headers:
            return (given.get("client_id"), given.get("client_secret")) == (self.client_id, self.secret)
        pair = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        return [unquote_plus(part) for part in pair.split(":")] == [self.client_id, self.secret]

    def _id_token(self, asked: dict[str, str]) -> str:
        now = int(time.time())
        usual = {
            "iss": self.url,
            "aud": self.client_id,
            "sub": "ada",
            "roles": ["supervisor", "of-another-application"],
            "nonce": asked["nonce"],
            "iat": now,
            "exp": now + 300,
            **self.behaviour.claims,
        }
        claims = {name: value for name, value in usual.items() if value is not None}
        key, kid = self.signs_with
        trouble, header = self.behaviour.trouble, {"kid": kid}
        if trouble == "alg none":
            return raw_token({"alg": "none", "typ": "JWT", **header}, claims)
        if trouble == "hs256":  # signed with what everybody knows: the public key, as a shared secret
            public = self.key.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            unsigned = raw_token({"alg": "HS256", "typ": "JWT", **header}, claims).rpartition(".")[0]
            signature = hmac.new(public, unsigned.encode(), hashlib.sha256).digest()
            return f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
        if trouble == "foreign key":
            return jwt.encode(claims, _FOREIGN, "ES256", headers=header)
        if trouble == "forged":
            other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            return jwt.encode(claims, other, "RS256", headers=header)
        return jwt.encode(claims, key, "RS256", headers=header)


@asynccontextmanager
async def serve_provider(provider: Provider) -> AsyncIterator[Provider]:
    runner = web.AppRunner(provider.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield provider
    finally:
        await runner.cleanup()


async def _run(arguments: argparse.Namespace) -> None:
    provider = Provider(arguments.client, arguments.secret, arguments.redirect, asks=arguments.asks)
    async with serve_provider(provider):
        # By another name than the gateway's address: for a browser these are two sites.
        provider.url = provider.url.replace("127.0.0.1", arguments.host)
        print(json.dumps({"url": provider.url}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", required=True)
    parser.add_argument("--secret")
    parser.add_argument("--redirect", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--asks", action="store_true")
    asyncio.run(_run(parser.parse_args()))
