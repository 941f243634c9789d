"""`[auth]`: whose word about who calls is believed; and where secrets come from."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from app.config.fields import STRICT, Algorithm, Claim, ConfigPath, Identifier, IssuerUrl, KeysUrl, VariableName, unfit
from app.core.limits import CONSOLE_SESSION_MS, CONSOLE_SESSION_MS_MIN, NAME_CHARS_MAX, OIDC_SCOPES_MAX
from app.domain.ledger.documents import Text

Scope = Annotated[str, StringConstraints(pattern=r"^[!#-\[\]-~]+$", max_length=NAME_CHARS_MAX)]  # RFC 6749, section 3.3


class _Table(BaseModel):
    model_config = STRICT


class CredentialConfig(_Table):
    """Where a secret comes from, such as a header of `[servers.X.credentials]`; its value is never in the file."""

    env: VariableName | None = None
    file: ConfigPath | None = None
    prefix: Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise unfit("either env or file")
        return self


class JwtConfig(_Table):
    """`[auth.jwt]`: whose tokens are believed, and which claims say who calls."""

    issuer: Identifier
    audience: Identifier
    algorithms: Annotated[list[Algorithm], Field(min_length=1)]
    jwks_url: KeysUrl | None = None
    jwks_file: ConfigPath | None = None
    principal_claim: Claim = "sub"
    tenant_claim: Claim = "tenant"
    roles_claim: Claim = "roles"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise unfit("either jwks_url or jwks_file")
        return self


class OidcConfig(_Table):
    """`[auth.oidc]`: where people sign in to the console. `client_secret`: where it comes from; none for a client that
    is known by PKCE alone. `session_ms`: how long a sign-in counts; the issuer is not asked again before its end."""

    issuer: IssuerUrl
    client_id: Identifier
    client_secret: CredentialConfig | None = None
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = ["RS256", "ES256", "EdDSA"]
    scopes: Annotated[list[Scope], Field(max_length=OIDC_SCOPES_MAX)] = ["openid"]
    name: Text | None = None  # what the button says; else the issuer's host
    session_ms: Annotated[int, Field(ge=CONSOLE_SESSION_MS_MIN, le=CONSOLE_SESSION_MS)] = CONSOLE_SESSION_MS
    principal_claim: Claim = "sub"
    tenant_claim: Claim = "tenant"
    roles_claim: Claim = "roles"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "openid" not in self.scopes:
            raise unfit("openid among the scopes: without it the issuer says nothing of who signs in")
        return self


class AuthConfig(_Table):
    """`[auth]`: `jwt` for bearer tokens of callers, `oidc` for people who sign in to the console."""

    jwt: JwtConfig | None = None
    oidc: OidcConfig | None = None
