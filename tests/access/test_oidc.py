"""Signing in by OpenID Connect: whom the issuer vouched for, to this client, for this very sign-in; and nobody else."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import aiohttp
import pytest

from app.cli.sign_in_finding import sign_in_finding
from app.config import load_config
from app.core.errors import IssuerUnavailable, SettingInvalid, SignInRefused, TgaError
from app.edge import issuer_keys, oidc
from app.edge.oidc import OidcProvider
from tests.access.provider import Behaviour, Provider, serve_provider

CLIENT, SECRET, PUBLIC = "tga-console", "s3cret & more", "http://127.0.0.1:8420"
CALLBACK = f"{PUBLIC}/console/sign-in/callback"


@dataclass(frozen=True)
class OidcFields:
    """The shape of `[auth.oidc]`."""

    issuer: str
    client_id: str = CLIENT
    algorithms: list[str] = field(default_factory=lambda: ["RS256", "ES256", "EdDSA"])
    scopes: list[str] = field(default_factory=lambda: ["openid", "profile"])
    name: str | None = None
    session_ms: int = 300_000
    principal_claim: str = "sub"
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"


async def has_tenant(tenant: str) -> bool:
    return tenant in ("default", "acme")


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with serve_provider(Provider(CLIENT, SECRET, [CALLBACK])) as serving:
        yield serving


@pytest.fixture
async def client(provider: Provider) -> AsyncIterator[OidcProvider]:
    made = client_of(provider.url)
    yield made
    await made.close()


def client_of(issuer: str, secret: str | None = SECRET, **changes: Any) -> OidcProvider:
    shows = None if secret is None else lambda: secret
    return OidcProvider(OidcFields(issuer, **changes), public_url=PUBLIC, has_tenant=has_tenant, secret=shows)


@dataclass
class Flow:
    """One sign-in: away with `state`, `nonce` and `verifier`, back with what the provider answers."""

    client: OidcProvider
    state: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    verifier: str = field(default_factory=lambda: secrets.token_urlsafe(48))

    async def code(self) -> str:
        at = await self.client.authorization_url(state=self.state, nonce=self.nonce, verifier=self.verifier)
        async with aiohttp.ClientSession() as session, session.get(at, allow_redirects=False) as answer:
            assert answer.status == 302, await answer.text()
            back = dict(parse_qsl(urlsplit(answer.headers["Location"]).query))
        assert back["state"] == self.state
        return back["code"]

    async def redeem(self, code: str, **changes: Any) -> Any:
        asked = {"nonce": self.nonce, "verifier": self.verifier, "named_issuer": None, **changes}
        return await self.client.redeem(code=code, **asked)

    async def whole(self) -> Any:
        return await self.redeem(await self.code())


async def refused(flow: Flow, kind: type[TgaError] = SignInRefused) -> str:
    with pytest.raises(kind) as told:
        await flow.whole()
    return str(told.value)


async def test_who_the_issuer_vouches_for_has_its_claims_roles_and_no_others(client: OidcProvider) -> None:
    principal = await Flow(client).whole()
    assert (principal.principal_id, principal.tenant, principal.roles) == ("ada", "default", ["supervisor"])


async def test_the_issuer_is_asked_with_all_that_binds_an_answer_to_this_sign_in(
    client: OidcProvider, provider: Provider
) -> None:
    flow = Flow(client)
    await flow.whole()
    (_, asked), (_, exchanged) = provider.asked
    assert (asked["state"], asked["nonce"], asked["scope"]) == (flow.state, flow.nonce, "openid profile")
    assert flow.verifier not in asked.values(), "the secret of PKCE left the gateway too early"
    assert exchanged["code_verifier"] == flow.verifier
    assert SECRET not in exchanged.values(), "a secret that belongs in a header"


@pytest.mark.parametrize("methods", [["client_secret_post"], ["client_secret_basic", "client_secret_post"], None])
async def test_the_client_shows_its_secret_as_the_issuer_takes_it(provider: Provider, methods: Any) -> None:
    provider.behaviour = Behaviour(discovery={"token_endpoint_auth_methods_supported": methods})
    assert (await Flow(client_of(provider.url)).whole()).principal_id == "ada"
    assert ("client_secret" in provider.asked[-1][1]) == (methods == ["client_secret_post"])


async def test_a_client_without_a_secret_is_known_by_pkce(provider: Provider) -> None:
    provider.secret = None
    assert (await Flow(client_of(provider.url, secret=None)).whole()).principal_id == "ada"


async def test_claims_may_have_other_names(provider: Provider) -> None:
    provider.behaviour = Behaviour(claims={"email": "a@b.example", "org": "acme", "groups": ["auditor"], "roles": None})
    client = client_of(provider.url, principal_claim="email", tenant_claim="org", roles_claim="groups")
    principal = await Flow(client).whole()
    assert (principal.principal_id, principal.tenant, principal.roles) == ("a@b.example", "acme", ["auditor"])


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("", {"iss": "https://evil.example"}, "another issuer"),
    ("", {"iss": None}, "lacks a claim"),
    ("", {"aud": "another-client"}, "another client"),
    ("", {"aud": None}, "lacks a claim"),
    ("", {"aud": [CLIENT, "another-client"]}, "another client"),  # several, and nobody says for whom
    ("", {"aud": [CLIENT, "another-client"], "azp": "another-client"}, "another client"),
    ("", {"azp": "another-client"}, "another client"),
    ("", {"nonce": None}, "nonce"),
    ("", {"nonce": "of-another-sign-in"}, "nonce"),
    ("", {"nonce": 7}, "nonce"),
    ("", {"exp": 1_000_000_000}, "expired"),
    ("", {"exp": None}, "lacks a claim"),
    ("", {"exp": "9999999999"}, "no number"),
    ("", {"nbf": 4_000_000_000}, "not valid yet"),
    ("", {"iat": None}, "lacks a claim"),
    ("", {"sub": None}, "lacks a claim"),
    ("", {"roles": ["of-another-application"]}, "no role"),
    ("", {"roles": "admin"}, "no role"),
    ("", {"roles": None}, "no role"),
    ("", {"tenant": "nowhere"}, "tenant"),
    ("", {"sub": "a\nb"}, "cannot be verified"),
    ("alg none", {}, "algorithm"),
    ("hs256", {}, "algorithm"),
    ("foreign key", {}, "key that the issuer publishes"),
    ("forged", {}, "signature"),
]


@pytest.mark.parametrize(("trouble", "claims", "why"), HOSTILE, ids=lambda value: str(value)[:40])
async def test_a_token_that_is_not_right_signs_nobody_in(
    client: OidcProvider, provider: Provider, trouble: str, claims: dict[str, Any], why: str
) -> None:
    provider.behaviour = Behaviour(trouble=trouble, claims=claims)
    told = await refused(Flow(client))
    assert why in told
    assert "eyJ" not in told


async def test_several_audiences_are_fine_when_it_says_which_is_meant(client: OidcProvider, provider: Provider) -> None:
    provider.behaviour = Behaviour(claims={"aud": [CLIENT, "another-client"], "azp": CLIENT})
    assert (await Flow(client).whole()).principal_id == "ada"


async def test_a_code_is_taken_once_and_with_its_own_verifier(client: OidcProvider) -> None:
    flow = Flow(client)
    code = await flow.code()
    assert (await flow.redeem(code)).principal_id == "ada"
    with pytest.raises(SignInRefused, match="used before"):
        await flow.redeem(code)
    with pytest.raises(SignInRefused, match="invalid_grant"):
        await flow.redeem(await flow.code(), verifier=secrets.token_urlsafe(48))


async def test_a_token_of_another_sign_in_of_the_same_person_is_refused(client: OidcProvider) -> None:
    mine, other = Flow(client), Flow(client)
    with pytest.raises(SignInRefused, match="nonce"):
        await mine.redeem(await other.code(), verifier=other.verifier)


async def test_an_answer_that_names_another_issuer_is_refused_before_its_code_goes_anywhere(
    client: OidcProvider, provider: Provider
) -> None:
    flow = Flow(client)
    code = await flow.code()
    with pytest.raises(SignInRefused, match="another issuer"):
        await flow.redeem(code, named_issuer="https://evil.example")
    assert [what for what, _ in provider.asked] == ["authorize"]
    assert (await flow.redeem(code, named_issuer=provider.url)).principal_id == "ada"


async def test_an_issuer_that_says_it_names_itself_must(provider: Provider) -> None:
    provider.behaviour = Behaviour(discovery={"authorization_response_iss_parameter_supported": True})
    flow = Flow(client_of(provider.url))
    assert "iss" in await refused(flow)
    assert (await flow.redeem(await flow.code(), named_issuer=provider.url)).principal_id == "ada"


async def test_a_rotated_key_is_fetched_and_the_withdrawn_one_no_longer_counts(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "JWKS_REFRESH_EVERY_MS", 0)
    client = client_of(provider.url)
    assert (await Flow(client).whole()).principal_id == "ada"
    old, old_kid = provider.key, provider.kid
    provider.rotate()
    assert (await Flow(client).whole()).principal_id == "ada"
    provider.signs_with = (old, old_kid)
    assert "key that the issuer publishes" in await refused(Flow(client))
    await client.close()


@pytest.mark.parametrize(
    ("discovery", "why"),
    [
        ({"issuer": "https://evil.example"}, "calls itself"),
        ({"issuer": None}, "calls itself"),
        ({"authorization_endpoint": "http://evil.example/authorize"}, "authorization_endpoint"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization_endpoint"),
        ({"token_endpoint": None}, "token_endpoint"),
        ({"token_endpoint": "https://user:word@h/token"}, "token_endpoint"),
        ({"jwks_uri": 7}, "jwks_uri"),
        ({"end_session_endpoint": "http://evil.example/"}, "end_session_endpoint"),
        ({"code_challenge_methods_supported": ["plain"]}, "PKCE"),
        ({"code_challenge_methods_supported": 7}, "PKCE"),
    ],
)
async def test_a_discovery_document_that_leads_elsewhere_is_not_followed(
    provider: Provider, discovery: dict[str, Any], why: str
) -> None:
    provider.behaviour = Behaviour(discovery=discovery)
    assert why in await refused(Flow(client_of(provider.url)), IssuerUnavailable)
    assert provider.asked == []


async def test_an_issuer_that_is_down_says_so_and_is_asked_again_when_it_is_back(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.behaviour = Behaviour(status=503)
    client = client_of(provider.url)
    assert "discovery" in await refused(Flow(client), IssuerUnavailable)
    provider.behaviour = Behaviour()
    assert "discovery" in await refused(Flow(client), IssuerUnavailable), "it is pressed by everybody who tries"
    monkeypatch.setattr(oidc, "OIDC_RETRY_AFTER_MS", 0)
    assert (await Flow(client).whole()).principal_id == "ada"
    gone = client_of("http://127.0.0.1:9")
    assert "cannot be reached" in await refused(Flow(gone), IssuerUnavailable)


async def test_what_was_discovered_outlives_an_issuer_that_cannot_be_asked_again(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(provider.url)
    await Flow(client).whole()
    monkeypatch.setattr(oidc, "OIDC_DISCOVERY_AGE_MAX_MS", 0)
    provider.behaviour = Behaviour(status=503)
    assert (await Flow(client).whole()).principal_id == "ada"


async def test_a_token_endpoint_that_breaks_or_never_answers_ends_in_time(
    client: OidcProvider, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.behaviour = Behaviour(trouble="broken")
    assert "cannot be read" in await refused(Flow(client), IssuerUnavailable)
    flow = Flow(client)
    code = await flow.code()
    provider.behaviour = Behaviour(trouble="silent")
    monkeypatch.setattr(oidc, "OIDC_TIMEOUT_MS", 50)
    async with asyncio.timeout(60):
        with pytest.raises(IssuerUnavailable, match="no answer in time"):
            await flow.redeem(code)


async def test_a_wrong_secret_is_told_without_it(provider: Provider) -> None:
    told = await refused(Flow(client_of(provider.url, "wr0ng")))
    assert "invalid_client" in told
    assert "wr0ng" not in told


async def test_signing_out_goes_on_to_the_issuer_where_it_ends_sessions(provider: Provider) -> None:
    at = await client_of(provider.url).end_session_url(hint="ada")
    assert at is not None
    asked = {name: values[0] for name, values in parse_qs(urlsplit(at).query).items()}
    assert asked == {
        "client_id": CLIENT,
        "post_logout_redirect_uri": f"{PUBLIC}/console/sign-in",
        "logout_hint": "ada",
    }
    provider.behaviour = Behaviour(discovery={"end_session_endpoint": None})
    assert await client_of(provider.url).end_session_url(hint="ada") is None


@pytest.mark.parametrize("issuer", ["http://id.example.org", "ftp://h", "https://u:p@id.example.org", "x"])
def test_an_issuer_that_others_could_play_is_no_issuer(issuer: str) -> None:
    with pytest.raises(SettingInvalid):
        client_of(issuer)


def config_of(folder: Path, issuer: str, *lines: str) -> Path:
    path = folder / "tga.toml"
    table = [f'issuer = "{issuer}"', f'client_id = "{CLIENT}"', *lines]
    path.write_text("\n".join([f'public_url = "{PUBLIC}"', "[auth.oidc]", *table]))
    return path


async def test_doctor_says_whether_people_can_sign_in(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "oidc.secret").write_text(SECRET)
    path = config_of(tmp_path, provider.url, 'client_secret = { file = "oidc.secret" }')
    right = await sign_in_finding(load_config(path))
    assert right.is_right
    assert CALLBACK in (right.remedy or "")
    only_elliptic = config_of(tmp_path, provider.url, 'algorithms = ["ES256"]')
    wrong = await sign_in_finding(load_config(only_elliptic))
    assert (wrong.is_right, "no key that can be used" in wrong.found) == (False, True)
    unset = config_of(tmp_path, provider.url, 'client_secret = { env = "NO_SUCH" }')
    without = await sign_in_finding(load_config(unset))
    assert (without.is_right, "client_secret" in without.found) == (False, True)
    away = await sign_in_finding(load_config(config_of(tmp_path, "http://127.0.0.1:9")))
    assert (away.is_right, "cannot be reached" in away.found) == (False, True)
    named = await sign_in_finding(load_config(config_of(tmp_path, provider.url + "/")))
    assert (named.is_right, "calls itself" in named.found) == (False, True)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('client_secret = "in-the-clear"', "where to find it"),
        ('issuer = "http://id.example.org"', "https://"),
        ('scopes = ["profile"]', "openid"),
        ('algorithms = ["HS256"]', "EdDSA"),
        ("session_ms = 1", "300000"),
    ],
)
def test_a_mistake_in_its_table_is_named_without_a_secret(tmp_path: Path, line: str, named: str) -> None:
    name = line.partition(" ")[0]
    path = config_of(tmp_path, "https://id.example.org")
    kept = [text for text in path.read_text().splitlines() if not text.startswith(f"{name} ")]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(SettingInvalid) as told:
        load_config(path)
    assert named in str(told.value)
    assert "in-the-clear" not in str(told.value)


def test_without_a_public_url_there_is_no_way_back(tmp_path: Path) -> None:
    path = config_of(tmp_path, "https://id.example.org")
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(SettingInvalid, match="public_url"):
        load_config(path)
