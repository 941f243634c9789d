"""The tables of `tga.toml`, each with its fields, defaults and bounds. What spans tables is checked in `loading`."""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from yarl import URL

from app.config.telling import TelemetryConfig, WebhookEvent, WebhookFormat
from app.core.limits import (
    APPROVAL_TIMEOUT_MS,
    APPROVAL_TIMEOUT_MS_MAX,
    APPROVAL_TIMEOUT_MS_MIN,
    BLOB_BYTES_DEFAULT,
    BLOB_BYTES_MAX,
    CALL_ATTEMPTS_MAX,
    CALL_TIMEOUT_MS_MAX,
    CONFIGURED_LIMIT_MAX,
    CREDENTIAL_BYTES_MAX,
    CREDENTIALS_PER_SERVER_MAX,
    LOG_ORIGIN_CHARS_MAX,
    LUA_CHILDREN_MAX,
    LUA_CPU_MS_MAX,
    LUA_HTTP_BYTES,
    LUA_HTTP_BYTES_MAX,
    LUA_HTTP_HOSTS_MAX,
    LUA_HTTP_TIMEOUT_MS,
    LUA_HTTP_TIMEOUT_MS_MAX,
    LUA_MEMORY_BYTES_MAX,
    LUA_MEMORY_BYTES_MIN,
    LUA_OPERATIONS_MAX,
    LUA_SLOTS_MAX,
    MCP_ALLOWED_MAX,
    MCP_COMMAND_WORDS_MAX,
    MCP_ENVIRONMENT_MAX,
    MCP_HOLD_MS,
    MCP_HOLD_MS_MAX,
    MCP_START_TIMEOUT_MS,
    MCP_TASK_AFTER_MS,
    NAME_CHARS_MAX,
    POINTER_CHARS_MAX,
    RUN_LEASE_MS,
    RUN_LEASE_MS_MAX,
    RUN_LEASE_MS_MIN,
    SECRET_ARGUMENTS_MAX,
    SERVER_CONCURRENCY_MAX,
    TOOL_TAGS_MAX,
    UNREACHABLE_FOR_MS,
    UNREACHABLE_FOR_MS_MAX,
    URL_CHARS_MAX,
    WEBHOOKS_MAX,
)
from app.domain.ledger.documents import Name, Text
from app.domain.tools import OnUnknownOutcome, ToolClass

DEFAULT_TENANT: Final = "default"
Algorithm = Literal["EdDSA", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]

_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])+)+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
# What the gateway itself says in a request, and what would change how the request is framed or carried.
_GATEWAY_HEADERS = frozenset(
    {"idempotency-key", "traceparent", "tracestate", "user-agent", "accept", "accept-encoding"}
    | {"last-event-id", "host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
)
_GATEWAY_HEADER_PREFIXES = ("tga-", "content-", "proxy-", "mcp-")


def qualify(tenant: str, server_id: str) -> str:
    """The server's id among all tenants': as it is for the default tenant, `tenant/server` for the others.

    Two different pairs never give the same id: no tenant has a `/` in its name, and a `/` in what somebody sent as a
    server id does not lead into another tenant.
    """
    if tenant == DEFAULT_TENANT and "/" not in server_id:
        return server_id
    return f"{tenant}/{server_id}"


def _unfit(expected: str) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{expected}", {"expected": expected})


def _segment(name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise _unfit("a name without /, which separates tenant and server, and not . or ..")
    return name


def _tool_name(name: str) -> str:
    if name in (".", ".."):
        raise _unfit("a name that can be a segment of a URL")
    return name


def _url(written: str, *, signs_refused: str, expected: str) -> str:
    try:
        url = URL(written)
        is_fit = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        is_fit = False
    # Compared as written: an empty query or fragment, a space or a backslash is as wrong as a full one.
    if not is_fit or any(sign in written for sign in signs_refused) or not written.isprintable():
        raise _unfit(expected)
    return written


def _base_url(written: str) -> str:
    expected = "http://host[:port][/path] or https://, without user, query or fragment"
    return _url(written, signs_refused="@?#\\ ", expected=expected)


def _url_with_query(written: str) -> str:
    expected = "http://host[:port][/path][?query] or https://, without user or fragment"
    _url(written.partition("?")[0], signs_refused="@#\\ ", expected=expected)
    return _url(written, signs_refused="#\\ ", expected=expected)


def _keys_url(written: str) -> str:
    _url_with_query(written)
    url = URL(written)
    # Whoever can answer in the key server's place can sign tokens for anybody.
    if url.scheme == "http" and not _is_this_machine(url.host or ""):
        raise _unfit("https://, or http:// to this machine")
    return written


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise _unfit("the name of an HTTP header")
    if name.lower() in _GATEWAY_HEADERS or name.lower().startswith(_GATEWAY_HEADER_PREFIXES):
        raise _unfit("a header that the gateway does not set itself")
    return name


def _distinct_headers(headers: dict[str, Any]) -> dict[str, Any]:
    if len({name.lower() for name in headers}) < len(headers):
        raise _unfit("each header once; case does not tell them apart")
    return headers


def _object_store_url(written: str) -> str:
    expected = "s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix] or file:///folder"
    try:
        url = urlsplit(written)
        is_fit = (url.scheme in ("s3", "gs", "az") and bool(url.netloc)) or (
            url.scheme == "file" and not url.netloc and len(url.path) > 1
        )
    except ValueError:
        is_fit = False
    if not is_fit or any(sign in written for sign in "@?#\\ ") or not written.isprintable() or ".." in written:
        raise _unfit(expected)
    return written


def _pointers(pointers: list[str]) -> list[str]:
    steps = sorted(split_pointer(pointer) for pointer in pointers)
    for one, other in pairwise(steps):
        if other[: len(one)] == one:  # in this order, what is inside another follows at once
            raise _unfit("pointers to different values, none inside another")
    return pointers


def split_pointer(pointer: str) -> tuple[str, ...]:
    """The steps of a JSON pointer (RFC 6901) that leads to a member: not the root, and no step without a name."""
    if not _POINTER.fullmatch(pointer):
        # "/" and "/card/" name members called "": surely meant otherwise, and then the value would stand in clear.
        raise _unfit('JSON pointers to members of the arguments, such as "/card"')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer[1:].split("/"))


def _path(written: object, info: ValidationInfo) -> Path:
    if isinstance(written, Path):
        return written
    if not isinstance(written, str) or not written or not written.isprintable():
        raise _unfit("a path, absolute or from the folder of this file")
    return ((info.context or {}).get("path") or Path()).parent / written


Transport = Literal["http", "mcp-stdio", "mcp-http"]
ADDRESS_FIELDS: Final[dict[str, str]] = {"http": "base_url", "mcp-stdio": "command", "mcp-http": "url"}
TRANSPORTS_OF_FIELD: Final[dict[str, tuple[str, ...]]] = {
    "base_url": ("http",),
    "url": ("mcp-http",),
    "command": ("mcp-stdio",),
    "folder": ("mcp-stdio",),
    "env": ("mcp-stdio",),
    "credentials": ("http", "mcp-http"),
    "protocol_version": ("mcp-stdio", "mcp-http"),
    "start_timeout_ms": ("mcp-stdio", "mcp-http"),
    "trust_annotations": ("mcp-stdio", "mcp-http"),
}
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Value = Annotated[str, StringConstraints(max_length=CREDENTIAL_BYTES_MAX, pattern=r"^[^\x00]*$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX, pattern=r"^[^\x00]*$")]
SegmentName = Annotated[Name, AfterValidator(_segment)]
ToolName = Annotated[Name, AfterValidator(_tool_name)]
BaseUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_base_url)]
PlainQueryUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_url_with_query)]
QueryUrl = Annotated[PlainQueryUrl, Field(repr=False)]
ObjectStoreUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_object_store_url)]
KeysUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_keys_url)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
ConfigPath = Annotated[Path, PlainValidator(_path)]
Pointers = Annotated[
    list[Annotated[str, Field(max_length=POINTER_CHARS_MAX)]],
    Field(max_length=SECRET_ARGUMENTS_MAX),
    AfterValidator(_pointers),
]
Claim = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX)]
# What C2SP admits in the name of a key, kept to printable ASCII.
Origin = Annotated[str, StringConstraints(pattern=r"^[!-*,-~]+$", max_length=LOG_ORIGIN_CHARS_MAX)]
HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+$", max_length=253)]
HostAndPort = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$", max_length=259)]
PageOrigin = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://[^/?#@ ]+$", max_length=URL_CHARS_MAX)]
Limit = Annotated[int, Field(ge=1, le=CONFIGURED_LIMIT_MAX)]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ToolConfig(_Table):
    """`[servers.X.tools.Y]`. Of an MCP server: what is to hold for a tool that the server itself describes."""

    tool_class: ToolClass | None = Field(alias="class", default=None)
    on_unknown_outcome: OnUnknownOutcome = "redispatch"
    reconcile_tool: Name | None = None
    tags: Annotated[list[Name], Field(max_length=TOOL_TAGS_MAX)] = []
    approval_timeout_ms: Annotated[int, Field(ge=APPROVAL_TIMEOUT_MS_MIN, le=APPROVAL_TIMEOUT_MS_MAX)] = (
        APPROVAL_TIMEOUT_MS
    )
    secret_arguments: Pointers = []
    input_schema: dict[str, Any] = {"type": "object"}
    description: Text | None = None


class CredentialConfig(_Table):
    """A header of `[servers.X.credentials]`: where its value comes from. The value itself is never in the file."""

    env: VariableName | None = None
    file: ConfigPath | None = None
    prefix: Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise _unfit("either env or file")
        return self


class ServerConfig(_Table):
    """`[servers.X]`. `max_concurrency`: calls sent to it at once. `max_in_flight`: accepted for it, not finished."""

    transport: Transport
    base_url: BaseUrl | None = None  # http
    url: PlainQueryUrl | None = Field(default=None, repr=False)  # mcp-http
    command: Annotated[list[Word], Field(min_length=1, max_length=MCP_COMMAND_WORDS_MAX)] | None = None  # mcp-stdio
    folder: ConfigPath | None = None  # where the command runs; else the folder of this file
    env: dict[VariableName, CredentialConfig | Value] = Field(default={}, max_length=MCP_ENVIRONMENT_MAX, repr=False)
    protocol_version: Literal["2026-07-28", "2025-11-25"] | None = None  # else the newest that the server speaks
    trust_annotations: bool = False
    start_timeout_ms: Annotated[int, Field(ge=1, le=CALL_TIMEOUT_MS_MAX)] = MCP_START_TIMEOUT_MS  # to its first answer
    timeout_ms: Annotated[int, Field(ge=1, le=CALL_TIMEOUT_MS_MAX)] = 30_000
    max_attempts: Annotated[int, Field(ge=1, le=CALL_ATTEMPTS_MAX)] = 5
    unreachable_for_ms: Annotated[int, Field(ge=0, le=UNREACHABLE_FOR_MS_MAX)] = UNREACHABLE_FOR_MS
    max_concurrency: Annotated[int, Field(ge=1, le=SERVER_CONCURRENCY_MAX)] = 32
    max_in_flight: Limit = 1024
    tenant: SegmentName = DEFAULT_TENANT
    credentials: Annotated[
        dict[HeaderName, CredentialConfig],
        Field(max_length=CREDENTIALS_PER_SERVER_MAX),
        AfterValidator(_distinct_headers),
    ] = {}
    tools: dict[ToolName, ToolConfig] = {}

    @property
    def is_mcp(self) -> bool:
        return self.transport.startswith("mcp-")


class PolicyConfig(_Table):
    """`[policy]`"""

    file: ConfigPath


class WebhookConfig(_Table):
    """`[webhooks.X]`. The URL is not shown: its query may hold a token. `events`: what it is told of; all of it.
    `format`: as docs/webhooks.md says, or as Slack or Microsoft Teams take messages."""

    url: QueryUrl
    events: Annotated[list[WebhookEvent], Field(min_length=1)] = list(get_args(WebhookEvent))
    format: WebhookFormat = "json"


class TenantConfig(_Table):
    """`[tenants.X]`: that it exists."""


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
            raise _unfit("either jwks_url or jwks_file")
        return self


class AuthConfig(_Table):
    """`[auth]`"""

    jwt: JwtConfig | None = None


class LimitsConfig(_Table):
    """`[limits]`: where back-pressure begins. Rate and burst are of one principal."""

    requests_per_second: Limit = 200
    burst: Limit = 400
    in_flight_per_principal: Limit = 256
    in_flight: Limit = 2048
    event_subscribers: Limit = 256
    waiting_workers: Limit = 256


class LogConfig(_Table):
    """`[log]`. The origin names the log in its signed heads, for ever: best a domain of yours and a path."""

    origin: Origin | None = None


class RunsConfig(_Table):
    """`[runs]`. `lease_ms`: how long a worker may be silent before its runs go to another; it sends a heartbeat three
    times in that time."""

    lease_ms: Annotated[int, Field(ge=RUN_LEASE_MS_MIN, le=RUN_LEASE_MS_MAX)] = RUN_LEASE_MS


class McpConfig(_Table):
    """`[mcp]`: the gateway as an MCP server. `hold_ms`: how long a call is held for a client that does not take tasks.
    `task_after_ms`: after how long a call becomes a task for one that does; one that waits for a person does at once.
    `allowed_hosts`: names under which it is reached, beside localhost and addresses. `allowed_origins`: web pages that
    may ask, beside those of this machine."""

    hold_ms: Annotated[int, Field(ge=0, le=MCP_HOLD_MS_MAX)] = MCP_HOLD_MS
    task_after_ms: Annotated[int, Field(ge=0, le=MCP_HOLD_MS_MAX)] = MCP_TASK_AFTER_MS
    allowed_hosts: Annotated[list[HostName], Field(max_length=MCP_ALLOWED_MAX)] = []
    allowed_origins: Annotated[list[PageOrigin], Field(max_length=MCP_ALLOWED_MAX)] = []


class BlobsConfig(_Table):
    """`[blobs]`: large values of runs. `url`: the object store; left out, the folder `blobs` in the home directory."""

    url: ObjectStoreUrl | None = None
    max_bytes: Annotated[int, Field(ge=1, le=BLOB_BYTES_MAX)] = BLOB_BYTES_DEFAULT


class LuaHttpConfig(_Table):
    """`[lua.http]`: what programs read with `http_client`. `allowed_hosts`: `host` or `host:port`; none by default.
    `private_hosts`: those that may have addresses of private networks. `tenants`: whose programs have it."""

    allowed_hosts: Annotated[list[HostAndPort], Field(max_length=LUA_HTTP_HOSTS_MAX)] = []
    private_hosts: Annotated[list[HostName], Field(max_length=LUA_HTTP_HOSTS_MAX)] = []
    tenants: Annotated[list[SegmentName], Field(min_length=1, max_length=LUA_HTTP_HOSTS_MAX)] = [DEFAULT_TENANT]
    max_bytes: Annotated[int, Field(ge=1, le=LUA_HTTP_BYTES_MAX)] = LUA_HTTP_BYTES
    timeout_ms: Annotated[int, Field(ge=1, le=LUA_HTTP_TIMEOUT_MS_MAX)] = LUA_HTTP_TIMEOUT_MS


class LuaConfig(_Table):
    """`[lua]`: programs that are submitted as text. `children`: processes that they run in. `slots`: runs at once, of a
    tenant. `slice_cpu_ms`: CPU between two operations; `attempt_cpu_ms`: of one attempt. `agent_models`: models that
    agents may name, as pydantic-ai calls them. `models`: predictors by name. `model_folders`: of model files."""

    enabled: bool = True
    children: Annotated[int, Field(ge=1, le=LUA_CHILDREN_MAX)] = 2
    slots: Annotated[int, Field(ge=1, le=LUA_SLOTS_MAX)] = 32
    strict_determinism: bool = False
    memory_bytes: Annotated[int, Field(ge=LUA_MEMORY_BYTES_MIN, le=LUA_MEMORY_BYTES_MAX)] = 67_108_864
    slice_cpu_ms: Annotated[int, Field(ge=10, le=LUA_CPU_MS_MAX)] = 2_000
    attempt_cpu_ms: Annotated[int, Field(ge=10, le=LUA_CPU_MS_MAX)] = 60_000
    operations: Annotated[int, Field(ge=1, le=LUA_OPERATIONS_MAX)] = 100_000
    agent_models: dict[Name, Name] = {}
    models: dict[Name, dict[str, Any]] = {}
    model_folders: list[ConfigPath] = []
    http: LuaHttpConfig = LuaHttpConfig()


class Config(_Table):
    """All of `tga.toml`, checked. Paths in it are complete. `public_url`: where people reach the gateway's console."""

    public_url: BaseUrl | None = None
    servers: dict[SegmentName, ServerConfig] = {}
    policy: PolicyConfig | None = None
    webhooks: Annotated[dict[Name, WebhookConfig], Field(max_length=WEBHOOKS_MAX)] = {}
    tenants: dict[SegmentName, TenantConfig] = {}
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    mcp: McpConfig = McpConfig()
    runs: RunsConfig = RunsConfig()
    blobs: BlobsConfig = BlobsConfig()
    lua: LuaConfig = LuaConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    _path: Path = PrivateAttr(default=Path("tga.toml"))

    def model_post_init(self, context: Any) -> None:
        if isinstance(context, dict):
            self._path = context["path"]

    @property
    def path(self) -> Path:
        """The file that it was read from."""
        return self._path
