"""What `tga doctor` says of signing in to the console: whether the issuer of `[auth.oidc]` answers, and has keys."""

from __future__ import annotations

from app.cli.findings import Finding
from app.config import Config
from app.core.errors import TgaError


async def sign_in_finding(config: Config) -> Finding:
    """Asks for the discovery document and the keys; it signs no person in, and the client secret is not shown to it."""
    from app.gateway.identity_provider import provider_of

    async def any_tenant(_: str) -> bool:
        return True

    what = "sign-in"
    try:
        provider = provider_of(config, has_tenant=any_tenant)
        try:
            found = await provider.metadata()
            await provider.verify_keys()
        finally:
            await provider.close()
    except TgaError as error:
        return Finding(what, False, str(error).removesuffix(f". {error.next_step}"), error.next_step)
    ends = "ends sessions too" if found.end_session_endpoint is not None else "does not end sessions"
    remedy = f"Register {provider.redirect_uri} there."
    return Finding(what, True, f"{provider.name} answers, has keys of the configured algorithms, {ends}", remedy)
