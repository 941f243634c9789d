"""The identity provider of `[auth.oidc]`, with its client secret from where the configuration says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from app.config import Config
from app.connectors.credentials import Credentials
from app.core.errors import SettingInvalid
from app.edge.oidc import OidcProvider

_SECRET = "client_secret"  # noqa: S105 - the name of the field


def provider_of(config: Config, *, has_tenant: Callable[[str], Awaitable[bool]]) -> OidcProvider:
    """Asks nothing of it yet: an issuer that is down keeps no one with an API key out. SettingInvalid without its
    secret."""
    settings = config.auth.oidc
    if settings is None or config.public_url is None:
        raise SettingInvalid("there is no [auth.oidc], or no public_url")
    secret = None
    if settings.client_secret is not None:
        held = Credentials.open("auth.oidc", {_SECRET: settings.client_secret})

        def secret() -> str:
            return held.headers()[_SECRET]

    return OidcProvider(settings, public_url=config.public_url, has_tenant=has_tenant, secret=secret)
