"""Tokens: only what the issuer signed, for us, now, with a pinned algorithm, for a tenant that exists."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm

from app.core.errors import InputMalformed, InputTooLarge, SettingInvalid
from app.core.limits import CREDENTIAL_CHARS_MAX, JWKS_BYTES_MAX, JWKS_KEYS_MAX, JWT_LEEWAY_S
from app.edge import issuer_keys
from app.edge.issuer_keys import parse_jwks
from app.edge.tokens import JwtVerifier
from tests.access.issuer import (
    ALL_KEYS,
    PRIVATE,
    JwtFields,
    KeyServer,
    claims,
    jwks,
    public_jwk,
    raw_token,
    serve_keys,
    token,
)
from tests.connectors.servers import endless, raw_server

TENANTS = {"default", "acme"}


async def has_tenant(tenant: str) -> bool:
    return tenant in TENANTS


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_bytes(ALL_KEYS)
    return path


@pytest.fixture
def verifier(keys_file: Path) -> JwtVerifier:
    return JwtVerifier(JwtFields(jwks_file=keys_file), has_tenant=has_tenant)


@pytest.fixture
async def key_server() -> AsyncIterator[KeyServer]:
    async with serve_keys() as serving:
        yield serving


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "ES384", "RS256", "PS256"])
async def test_what_the_issuer_signed_is_believed(verifier: JwtVerifier, algorithm: str) -> None:
    kid = "rs256" if algorithm == "PS256" else None
    principal = await verifier.verify(token(algorithm, kid=kid, tenant="acme", roles=["operator", "x", "agent"]))
    assert principal is not None
    assert (principal.principal_id, principal.tenant, principal.roles) == ("ada", "acme", ["agent", "operator"])


async def test_claims_may_have_other_names(keys_file: Path) -> None:
    fields = JwtFields(jwks_file=keys_file, principal_claim="email", tenant_claim="org", roles_claim="groups")
    verifier = JwtVerifier(fields, has_tenant=has_tenant)
    principal = await verifier.verify(token(sub=None, roles=None, email="a@b.example", org="acme", groups=["admin"]))
    assert principal is not None
    assert (principal.principal_id, principal.tenant, principal.roles) == ("a@b.example", "acme", ["admin"])
    assert await verifier.verify(token()) is None


async def test_a_token_without_a_tenant_is_of_the_default_one(verifier: JwtVerifier) -> None:
    principal = await verifier.verify(token())
    assert principal is not None
    assert principal.tenant == "default"


BAD_CLAIMS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://evil.example"},
    "issuer with a slash": {"iss": "https://issuer.example/"},
    "no issuer": {"iss": None},
    "another audience": {"aud": "someone"},
    "audiences without us": {"aud": ["a", "b"]},
    "no audience": {"aud": None},
    "expired": {"exp": int(time.time()) - JWT_LEEWAY_S - 5},
    "no expiry": {"exp": None},
    "expiry as a text": {"exp": "99999999999"},
    "expiry as a truth": {"exp": True},
    "expiry as a list": {"exp": [99999999999]},
    "not yet": {"nbf": int(time.time()) + 3600},
    "issued in the future": {"iat": int(time.time()) + 3600},
    "not before as a text": {"nbf": "0"},
    "no principal": {"sub": None},
    "principal with spaces": {"sub": "ada lovelace"},
    "principal that is a number": {"sub": 5},
    "principal too long": {"sub": "a" * 129},
    "principal empty": {"sub": ""},
    "no roles": {"roles": None},
    "only unknown roles": {"roles": ["root", "Admin"]},
    "roles as a text": {"roles": "admin agent"},
    "roles as an object": {"roles": {"admin": True}},
    "roles of other types": {"roles": [["admin"], None, 1]},
    "a tenant that does not exist": {"tenant": "nobody"},
    "tenant of another type": {"tenant": ["acme"]},
    "tenant with a space": {"tenant": "ac me"},
}


@pytest.mark.parametrize("name", BAD_CLAIMS)
async def test_a_signed_token_with_wrong_claims_is_refused(verifier: JwtVerifier, name: str) -> None:
    assert await verifier.verify(token(**BAD_CLAIMS[name])) is None


async def test_clocks_may_differ_a_little(verifier: JwtVerifier) -> None:
    now = int(time.time())
    near = JWT_LEEWAY_S - 10
    assert await verifier.verify(token(exp=now - near)) is not None
    assert await verifier.verify(token(nbf=now + near, iat=now + near)) is not None


async def test_a_token_may_be_for_several_audiences(verifier: JwtVerifier) -> None:
    assert await verifier.verify(token(aud=["tga", "other"])) is not None


def unsigned(algorithm: str) -> str:
    return raw_token({"alg": algorithm, "kid": "rs256"}, claims())


def signed_with_public_key(form: str) -> str:
    """The classic: the verifier's public key taken for a shared secret."""
    public = PRIVATE["RS256"].public_key()
    if form == "pem":
        secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    elif form == "der":
        secret = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    else:
        secret = json.dumps(public_jwk(PRIVATE["RS256"], "rs256")).encode()
    bare = raw_token({"alg": "HS256", "kid": "rs256"}, claims())
    signature = hmac.new(secret, bare.rpartition(".")[0].encode(), hashlib.sha256).digest()
    return raw_token({"alg": "HS256", "kid": "rs256"}, claims(), signature)


def tampered() -> str:
    header, _, signature = token().split(".")
    payload = raw_token({}, claims(roles=["admin"])).split(".")[1]
    return f"{header}.{payload}.{signature}"


def of_mixed_keys(algorithm: str, kid: str) -> str:
    return jwt.encode(claims(), PRIVATE[algorithm], algorithm, headers={"kid": kid})


FORGED = {
    **{f"alg {name}": unsigned(name) for name in ("none", "None", "NONE", "", "nOnE")},
    **{f"HS256 with the public key as {form}": signed_with_public_key(form) for form in ("pem", "der", "jwk")},
    "no alg": raw_token({"kid": "rs256"}, claims()),
    "alg of another type": raw_token({"alg": ["RS256"], "kid": "rs256"}, claims()),
    "kid of another type": raw_token({"alg": "RS256", "kid": {"a": 1}}, claims()),
    "claims changed": tampered(),
    "another's key under a known id": token(private=ed25519.Ed25519PrivateKey.generate()),
    "an unknown id": token(kid="nobody"),
    "no id": jwt.encode(claims(), PRIVATE["EdDSA"], "EdDSA"),
    "an algorithm that is not pinned": jwt.encode(claims(), PRIVATE["RS256"], "RS512", headers={"kid": "rs256"}),
    "a key of another type": of_mixed_keys("EdDSA", "rs256"),
    "a key of another curve": of_mixed_keys("ES256", "es384"),
    "an embedded key": jwt.encode(
        claims(),
        PRIVATE["ES256"],
        "ES256",
        headers={"kid": "mine", "jwk": public_jwk(PRIVATE["ES256"], "mine"), "jku": "http://127.0.0.1/evil"},
    ),
    "unknown critical header": jwt.encode(
        claims(), PRIVATE["EdDSA"], "EdDSA", headers={"kid": "eddsa", "crit": ["exp"], "exp": 1}
    ),
    "detached payload": jwt.encode(claims(), PRIVATE["EdDSA"], "EdDSA", headers={"kid": "eddsa", "b64": False}),
    "signature cut": token()[:-4],
    "no signature": token().rpartition(".")[0] + ".",
    "two parts": token().rpartition(".")[0],
    "four parts": token() + ".x",
    "payload no object": raw_token({"alg": "EdDSA", "kid": "eddsa"}, [1]),
    "header no object": raw_token(["EdDSA"], claims()),
    "deep header": "." + "[" * 900 + ".a",
    "empty": "",
    "dots": "..",
}


@pytest.mark.parametrize("name", FORGED)
async def test_what_the_issuer_did_not_sign_is_refused(verifier: JwtVerifier, name: str) -> None:
    assert await verifier.verify(FORGED[name]) is None


async def test_a_huge_token_is_refused_before_it_is_read(verifier: JwtVerifier) -> None:
    assert len(token(pad="x" * 2000)) < CREDENTIAL_CHARS_MAX
    assert await verifier.verify(token(pad="x" * 2000)) is not None
    assert await verifier.verify(token(pad="x" * CREDENTIAL_CHARS_MAX)) is None
    assert await verifier.verify("a" * 100_000_000) is None


@given(
    st.one_of(
        st.text(),
        st.binary().map(lambda raw: raw.decode("latin-1")),
        st.from_regex(r"[A-Za-z0-9_=-]*(\.[A-Za-z0-9_=-]*){0,3}"),
    )
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused_and_never_raises(verifier: JwtVerifier, garbage: str) -> None:
    assert asyncio.run(verifier.verify(garbage)) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "roles", "tenant", "jti"]), _JSON))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_issuer_signs_never_raises(verifier: JwtVerifier, changes: dict[str, Any]) -> None:
    payload = json.dumps({**claims(), **changes}).encode()
    signed = jwt.api_jws.encode(payload, PRIVATE["EdDSA"], "EdDSA", headers={"kid": "eddsa"})
    principal = asyncio.run(verifier.verify(signed))
    if principal is not None:
        assert principal.tenant in TENANTS
        assert principal.roles


@given(st.binary(max_size=200), st.sampled_from(["RS256", "EdDSA", "ES256", "PS256"]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_made_up_signature_is_accepted(verifier: JwtVerifier, signature: bytes, algorithm: str) -> None:
    kid = "rs256" if algorithm == "PS256" else algorithm.lower()
    forged = raw_token({"alg": algorithm, "kid": kid}, claims(), signature)
    assert asyncio.run(verifier.verify(forged)) is None


@pytest.mark.parametrize("algorithms", [[], ["none"], ["HS256"], ["RS256", "HS512"], ["ES256K"]])
def test_only_algorithms_with_a_public_key_can_be_configured(keys_file: Path, algorithms: list[str]) -> None:
    with pytest.raises(SettingInvalid):
        JwtVerifier(JwtFields(jwks_file=keys_file, algorithms=algorithms), has_tenant=has_tenant)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"jwks_url": "http://127.0.0.1/jwks", "jwks_file": Path("x")},
        {"jwks_url": "http://issuer.example/jwks"},
        {"jwks_url": "ftp://issuer.example/jwks"},
        {"jwks_url": "http://127.0.0.1.evil.example/jwks"},
        {"jwks_url": "http://localhost.evil.example/jwks"},
        {"jwks_url": "/etc/passwd"},
        {"jwks_url": "http://[::1"},
        {"jwks_file": Path("x"), "issuer": ""},
        {"jwks_file": Path("x"), "audience": ""},
    ],
)
def test_keys_come_from_one_safe_place(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingInvalid):
        JwtVerifier(JwtFields(**fields), has_tenant=has_tenant)
    JwtVerifier(JwtFields(jwks_url="https://issuer.example/jwks"), has_tenant=has_tenant)
    JwtVerifier(JwtFields(jwks_url="http://[::1]:5/jwks"), has_tenant=has_tenant)


def test_only_keys_that_can_be_trusted_are_taken_from_a_set() -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - weak is the point
    good = public_jwk(PRIVATE["ES256"], "good")
    k256 = ec.generate_private_key(ec.SECP256K1())
    rejected = [
        public_jwk(weak, "weak"),
        {**good, "kid": "enc", "use": "enc"},
        {**good, "kid": "ops", "key_ops": ["sign"]},
        {**good, "kid": "ops2", "key_ops": "verify"},
        {**good, "kid": "alg", "alg": "ES384"},
        {**good, "kid": "hmac", "alg": "HS256"},
        {**ECAlgorithm.to_jwk(PRIVATE["ES256"], as_dict=True), "kid": "private", "key_ops": ["verify"]},
        {**good, "kid": "point", "x": good["y"]},
        {**good, "kid": 5},
        {**good, "kid": ""},
        {name: value for name, value in good.items() if name != "kid"},
        public_jwk(k256, "k256"),
        {"kty": "oct", "kid": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        {"kty": "OKP", "crv": "X25519", "kid": "x", "x": "AAAA"},
        {"kty": ["EC"], "kid": "list"},
        {"kty": "RSA", "kid": "hollow"},
        "text",
        None,
    ]
    found = parse_jwks(json.dumps({"keys": [*rejected, good]}).encode(), issuer_keys.ALGORITHMS)
    assert list(found) == [("good", "ES256")]


def test_an_rsa_key_verifies_what_is_pinned_and_no_more() -> None:
    raw = jwks(public_jwk(PRIVATE["RS256"], "k"), public_jwk(PRIVATE["RS256"], "p", alg="PS256"))
    assert set(parse_jwks(raw, {"RS256", "PS256"})) == {("k", "RS256"), ("k", "PS256"), ("p", "PS256")}
    assert set(parse_jwks(raw, {"EdDSA"})) == set()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"keys": {}}', b"<html>", b'{"keys":[],"keys":[]}', b"\xff"])
def test_what_is_no_key_set_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(InputMalformed):
        parse_jwks(raw, {"EdDSA"})


def test_a_key_set_is_bounded() -> None:
    with pytest.raises(InputTooLarge):
        parse_jwks(jwks(*[{"kid": "x"}] * (JWKS_KEYS_MAX + 1)), {"EdDSA"})
    with pytest.raises(InputTooLarge):
        parse_jwks(b" " * (JWKS_BYTES_MAX + 1), {"EdDSA"})


async def test_a_changed_file_is_read_again_and_a_bad_one_keeps_the_old_keys(
    verifier: JwtVerifier, keys_file: Path
) -> None:
    new = ed25519.Ed25519PrivateKey.generate()
    rotated = token(private=new, kid="new")
    assert await verifier.verify(rotated) is None
    draft = keys_file.with_suffix(".new")
    draft.write_bytes(jwks(public_jwk(new, "new")))
    draft.replace(keys_file)
    assert await verifier.verify(rotated) is not None
    assert await verifier.verify(token()) is None  # its key was withdrawn
    keys_file.write_bytes(b"half a fi")
    assert await verifier.verify(rotated) is not None
    keys_file.unlink()
    assert await verifier.verify(rotated) is not None
    os.mkdir(keys_file)
    assert await verifier.verify(rotated) is not None


async def test_a_file_that_is_missing_at_the_start_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid):
        await JwtVerifier(JwtFields(jwks_file=tmp_path / "none"), has_tenant=has_tenant).start()


async def test_keys_rotate_over_http_and_strangers_cannot_press_the_issuer(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = JwtVerifier(JwtFields(jwks_url=key_server.url), has_tenant=has_tenant)
    await verifier.start()
    for _ in range(20):
        assert await verifier.verify(token()) is not None
    assert key_server.asked == 1
    new = ed25519.Ed25519PrivateKey.generate()
    key_server.body = jwks(public_jwk(new, "new"))
    rotated = token(private=new, kid="new")
    for number in range(20):
        assert await verifier.verify(token(kid=f"stranger-{number}")) is None
        assert await verifier.verify(unsigned("none")) is None
    assert key_server.asked == 1
    assert await verifier.verify(rotated) is None
    monkeypatch.setattr(issuer_keys, "JWKS_REFRESH_EVERY_MS", 50)
    await asyncio.sleep(0.06)
    assert await verifier.verify(unsigned("none")) is None  # what is not pinned is no reason to ask
    assert key_server.asked == 1
    answers = await asyncio.gather(*(verifier.verify(rotated) for _ in range(20)))
    assert None not in answers
    assert key_server.asked == 2
    assert await verifier.verify(token()) is None  # its key was withdrawn
    await verifier.close()


async def test_old_keys_are_fetched_again_without_making_anyone_wait(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "JWKS_REFRESH_EVERY_MS", 10)
    monkeypatch.setattr(issuer_keys, "JWKS_AGE_MAX_MS", 20)
    verifier = JwtVerifier(JwtFields(jwks_url=key_server.url), has_tenant=has_tenant)
    assert await verifier.verify(token()) is not None
    key_server.body = jwks(public_jwk(PRIVATE["ES256"], "es256"))
    await asyncio.sleep(0.03)
    assert await verifier.verify(token()) is not None
    for _ in range(100):
        if await verifier.verify(token()) is None:
            break
        await asyncio.sleep(0.01)
    assert await verifier.verify(token()) is None  # withdrawn
    assert await verifier.verify(token("ES256")) is not None
    await verifier.close()


@pytest.mark.parametrize("trouble", ["status", "redirect", "html", "long", "no keys", "slow", "gzip"])
async def test_a_fetch_that_fails_keeps_the_old_keys(
    key_server: KeyServer, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(issuer_keys, "JWKS_REFRESH_EVERY_MS", 0)
    verifier = JwtVerifier(JwtFields(jwks_url=key_server.url), has_tenant=has_tenant)
    assert await verifier.verify(token()) is not None
    asked = key_server.asked
    stranger = ed25519.Ed25519PrivateKey.generate()
    key_server.body = jwks(public_jwk(stranger, "new"))
    if trouble == "status":
        key_server.status = 500
    elif trouble == "redirect":
        key_server.status, key_server.headers = 302, {"Location": "/elsewhere"}
    elif trouble == "html":
        key_server.body = b"<html>"
    elif trouble == "long":
        key_server.body += b" " * (2 * JWKS_BYTES_MAX)
    elif trouble == "no keys":
        key_server.body = b'{"error": "later"}'
    elif trouble == "gzip":
        key_server.headers = {"Content-Encoding": "gzip"}
        key_server.body = b"\x1f\x8b"
    else:
        monkeypatch.setattr(issuer_keys, "JWKS_TIMEOUT_MS", 50)
        key_server.delay_s = 0.5
    assert await verifier.verify(token(private=stranger, kid="new")) is None
    assert key_server.asked > asked
    assert await verifier.verify(token()) is not None
    await verifier.close()


@pytest.mark.parametrize(
    ("first", "unit"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    ],
    ids=["100", "headers", "extension", "body"],
)
async def test_an_issuer_that_answers_without_end_is_left_at_once(
    monkeypatch: pytest.MonkeyPatch, first: bytes, unit: bytes
) -> None:
    monkeypatch.setattr(issuer_keys, "JWKS_TIMEOUT_MS", 600_000)  # it is not the time that ends it
    sent: list[int] = []
    async with raw_server(endless(first, unit, sent)) as raw:
        verifier = JwtVerifier(JwtFields(jwks_url=f"{raw.url}/jwks"), has_tenant=has_tenant)
        async with asyncio.timeout(60):
            await verifier.start()
        assert await verifier.verify(token()) is None
        await verifier.close()
    assert sum(sent) < 16_000_000
    assert len(raw.requests) == 1


async def test_an_issuer_that_is_down_stops_neither_start_nor_end() -> None:
    verifier = JwtVerifier(JwtFields(jwks_url="http://127.0.0.1:1/jwks"), has_tenant=has_tenant)
    await verifier.start()
    assert await verifier.verify(token()) is None
    await verifier.close()


async def test_a_caller_that_goes_away_does_not_end_the_fetch_for_others(key_server: KeyServer) -> None:
    verifier = JwtVerifier(JwtFields(jwks_url=key_server.url), has_tenant=has_tenant)
    impatient = asyncio.create_task(verifier.verify(token()))
    patient = asyncio.create_task(verifier.verify(token()))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient is not None
    await verifier.close()
