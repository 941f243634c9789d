"""The tables of `tga.toml`, each with its fields, defaults and bounds. What spans tables is checked in `loading`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr

from app.config.auth import AuthConfig, CredentialConfig
from app.config.fields import (
    STRICT,
    BaseUrl,
    ConfigPath,
    HeaderName,
    HostAndPort,
    HostName,
    Limit,
    ObjectStoreUrl,
    Origin,
    PageOrigin,
    PlainQueryUrl,
    Pointers,
    QueryUrl,
    SegmentName,
    ToolName,
    Value,
    VariableName,
    Word,
    distinct_headers,
)
from app.config.telling import TelemetryConfig, WebhookEvent, WebhookFormat
from app.core.limits import (
    APPROVAL_TIMEOUT_MS,
    APPROVAL_TIMEOUT_MS_MAX,
    APPROVAL_TIMEOUT_MS_MIN,
    BLOB_BYTES_DEFAULT,
    BLOB_BYTES_MAX,
    CALL_ATTEMPTS_MAX,
    CALL_TIMEOUT_MS_MAX,
    CREDENTIALS_PER_SERVER_MAX,
    DATABASE_CONNECTIONS,
    DATABASE_CONNECTIONS_MAX,
    DATABASE_CONNECTIONS_MIN,
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
    RUN_LEASE_MS,
    RUN_LEASE_MS_MAX,
    RUN_LEASE_MS_MIN,
    SERVER_CONCURRENCY_MAX,
    TOOL_TAGS_MAX,
    UNREACHABLE_FOR_MS,
    UNREACHABLE_FOR_MS_MAX,
    WEBHOOKS_MAX,
)
from app.domain.ledger.documents import Name, Text
from app.domain.tools import OnUnknownOutcome, ToolClass

DEFAULT_TENANT: Final = "default"


def qualify(tenant: str, server_id: str) -> str:
    """The server's id among all tenants': as it is for the default tenant, `tenant/server` for the others.

    Two different pairs never give the same id: no tenant has a `/` in its name, and a `/` in what a caller sent as a
    server id does not lead into another tenant.
    """
    if tenant == DEFAULT_TENANT and "/" not in server_id:
        return server_id
    return f"{tenant}/{server_id}"


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


class _Table(BaseModel):
    model_config = STRICT


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
        AfterValidator(distinct_headers),
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


class CallbacksConfig(_Table):
    """`[callbacks]`: hosts of URLs that questions of runs may name, to be told of them; `host` or `host:port`, none by
    default. `private_hosts`: those that may have addresses of private networks."""

    allowed_hosts: Annotated[list[HostAndPort], Field(max_length=LUA_HTTP_HOSTS_MAX)] = []
    private_hosts: Annotated[list[HostName], Field(max_length=LUA_HTTP_HOSTS_MAX)] = []


class TenantConfig(_Table):
    """`[tenants.X]`: that it exists."""


class LimitsConfig(_Table):
    """`[limits]`: where back-pressure begins. Rate and burst are of one principal. Each process has its own."""

    requests_per_second: Limit = 200
    burst: Limit = 400
    in_flight_per_principal: Limit = 256
    in_flight: Limit = 2048
    event_subscribers: Limit = 256
    waiting_workers: Limit = 256


class DatabaseConfig(_Table):
    """`[database]`. `connections`: to PostgreSQL, of all processes of one `tga serve` together."""

    connections: Annotated[int, Field(ge=DATABASE_CONNECTIONS_MIN, le=DATABASE_CONNECTIONS_MAX)] = DATABASE_CONNECTIONS


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
    slots: Annotated[int, Field(ge=1, le=LUA_SLOTS_MAX)] = 64
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
    callbacks: CallbacksConfig = CallbacksConfig()
    tenants: dict[SegmentName, TenantConfig] = {}
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    database: DatabaseConfig = DatabaseConfig()
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
