"""The configuration file `tga.toml`: what may stand in it, and every mistake in it by name.

A mistake is found when the file is read, and named by file, table and field. What this version does not have yet is
refused, never ignored.
"""

from __future__ import annotations

from app.config.auth import AuthConfig, CredentialConfig, JwtConfig, OidcConfig
from app.config.loading import load_config
from app.config.tables import (
    DEFAULT_TENANT,
    Config,
    LimitsConfig,
    LogConfig,
    PolicyConfig,
    ServerConfig,
    TenantConfig,
    ToolConfig,
    WebhookConfig,
    qualify,
)

__all__ = [
    "DEFAULT_TENANT",
    "AuthConfig",
    "Config",
    "CredentialConfig",
    "JwtConfig",
    "LimitsConfig",
    "LogConfig",
    "OidcConfig",
    "PolicyConfig",
    "ServerConfig",
    "TenantConfig",
    "ToolConfig",
    "WebhookConfig",
    "load_config",
    "qualify",
]
