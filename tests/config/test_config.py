"""The configuration file: every mistake is named, and nothing in it is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import Config, LimitsConfig, load_config
from app.core.errors import SettingInvalid
from app.core.limits import CONFIG_BYTES_MAX, ENCLOSED_DEPTH_MAX, INPUT_SCHEMA_BYTES_MAX, NAME_CHARS_MAX

SERVER = '[servers.pay]\ntransport = "http"\nbase_url = "http://127.0.0.1:9001"\n'
CHARGE = SERVER + '[servers.pay.tools.charge]\nclass = "write"\n'
STATUS = '[servers.pay.tools.status]\nclass = "read"\n'


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "tga.toml"
    path.write_text(text)
    return load_config(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(SettingInvalid) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "tga.toml") in str(caught.value)
    return str(caught.value)


def with_schema(schema: str) -> str:
    return CHARGE + f"input_schema = {schema}\n"


# Reading.

EVERYTHING = """
[servers.pay]
transport = "http"
base_url = "http://127.0.0.1:9001"
timeout_ms = 1500
max_attempts = 7
max_concurrency = 3
max_in_flight = 9
tenant = "acme"
[servers.pay.credentials]
Authorization = { env = "PAY_TOKEN", prefix = "Bearer " }
X-Key = { file = "keys/pay" }
[servers.pay.tools.charge]
class = "write"
description = "Charges."
tags = ["approval"]
approval_timeout_ms = 1000
secret_arguments = ["/card", "/a~1b/0/~0c"]
[policy]
file = "policy.cedar"
[webhooks.approvals]
url = "https://h/hook?token=t&to=a@b"
[tenants.acme]
[auth.jwt]
issuer = "https://id.example.org/"
audience = "tga"
algorithms = ["EdDSA", "RS256"]
jwks_url = "http://127.0.0.1:9/jwks?x=1"
principal_claim = "p"
tenant_claim = "t"
roles_claim = "r"
[limits]
requests_per_second = 1
burst = 2
in_flight_per_principal = 3
in_flight = 4
event_subscribers = 5
"""


def test_every_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "policy.cedar").write_text("")
    config = load(tmp_path, EVERYTHING)
    assert config.path == tmp_path / "tga.toml"
    server = config.servers["pay"]
    assert (server.timeout_ms, server.max_attempts, server.max_concurrency, server.max_in_flight) == (1500, 7, 3, 9)
    assert server.tenant == "acme"
    assert (server.credentials["Authorization"].env, server.credentials["Authorization"].prefix) == (
        "PAY_TOKEN",
        "Bearer ",
    )
    assert (server.credentials["X-Key"].file, server.credentials["X-Key"].prefix) == (tmp_path / "keys/pay", "")
    tool = server.tools["charge"]
    assert (tool.approval_timeout_ms, tool.secret_arguments) == (1000, ["/card", "/a~1b/0/~0c"])
    assert (tool.description, tool.tags) == ("Charges.", ["approval"])
    assert config.policy is not None
    assert config.policy.file == tmp_path / "policy.cedar"
    assert config.webhooks["approvals"].url == "https://h/hook?token=t&to=a@b"
    assert list(config.tenants) == ["acme"]
    jwt = config.auth.jwt
    assert jwt is not None
    assert (jwt.issuer, jwt.audience, jwt.algorithms) == ("https://id.example.org/", "tga", ["EdDSA", "RS256"])
    assert (jwt.jwks_url, jwt.jwks_file) == ("http://127.0.0.1:9/jwks?x=1", None)
    assert (jwt.principal_claim, jwt.tenant_claim, jwt.roles_claim) == ("p", "t", "r")
    limits = config.limits
    assert (limits.requests_per_second, limits.burst, limits.in_flight_per_principal) == (1, 2, 3)
    assert (limits.in_flight, limits.event_subscribers) == (4, 5)


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    jwt_only = '[auth.jwt]\nissuer = "i"\naudience = "a"\nalgorithms = ["EdDSA"]\njwks_file = "keys.json"\n'
    (tmp_path / "keys.json").write_text("{}")
    config = load(tmp_path, CHARGE + jwt_only)
    server, tool, jwt = config.servers["pay"], config.servers["pay"].tools["charge"], config.auth.jwt
    assert (server.timeout_ms, server.max_attempts, server.max_concurrency, server.max_in_flight) == (
        30_000,
        5,
        32,
        1024,
    )
    assert (server.tenant, server.credentials) == ("default", {})
    assert (tool.on_unknown_outcome, tool.reconcile_tool, tool.tags) == ("redispatch", None, [])
    assert (tool.approval_timeout_ms, tool.secret_arguments, tool.input_schema) == (86_400_000, [], {"type": "object"})
    assert (config.policy, config.webhooks, config.tenants) == (None, {}, {})
    assert jwt is not None
    assert (jwt.jwks_url, jwt.jwks_file) == (None, tmp_path / "keys.json")
    assert (jwt.principal_claim, jwt.tenant_claim, jwt.roles_claim) == ("sub", "tenant", "roles")
    assert config.limits == LimitsConfig(
        requests_per_second=200, burst=400, in_flight_per_principal=256, in_flight=2048, event_subscribers=256
    )


def test_an_empty_file_configures_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert (config.servers, config.auth.jwt) == ({}, None)


# Mistakes.

JWT = '[auth.jwt]\nissuer = "i"\naudience = "a"\n'
EDDSA = JWT + 'algorithms = ["EdDSA"]\n'


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        (SERVER + "colour = 1\n", "servers.pay.colour", "a field that exists (base_url, command, credentials"),
        (SERVER + "timeout = 1\n", "servers.pay.timeout", "a field that exists, such as timeout_ms"),
        ("[server.pay]\n", "server", "a field that exists, such as servers"),
        (CHARGE + 'secret_argument = ["/a"]\n', "charge.secret_argument", "such as secret_arguments"),
        (CHARGE + "klass = 1\n", "charge.klass", "such as class"),
        (SERVER + '[servers.pay.credentials]\nX = { enw = "A" }\n', "credentials.X.enw", "such as env"),
        ('[policy]\nfiel = "p"\n', "policy.file", "the field"),
        ('[policy]\nfile = "p"\npath = "p"\n', "policy.path", "a field that exists (file)"),
        ("[tenants.acme]\nname = 1\n", "tenants.acme.name", "there is none"),
        ("[auth.jvt]\n", "auth.jvt", "such as jwt"),
        (EDDSA + 'jwks = "x"\njwks_file = "tga.toml"\n', "auth.jwt.jwks", "such as jwks_url"),
        ("[limits]\nbursts = 1\n", "limits.bursts", "such as burst"),
        ('[webhooks.a]\nuri = "http://h"\nurl = "http://h"\n', "webhooks.a.uri", "such as url"),
        ("servers = 3\n", "servers", "table"),
        ('[servers.pay]\ntransport = "http"\n', "servers.pay.base_url", "the field"),
        ('[servers.pay]\nbase_url = "http://h"\n', "servers.pay.transport", "the field"),
        ('[servers.pay]\ntransport = "ftp"\nbase_url = "http://h"\n', "servers.pay.transport", "'http'"),
        (SERVER + "timeout_ms = 0\n", "servers.pay.timeout_ms", "greater than or equal to 1"),
        (SERVER + "timeout_ms = 600001\n", "servers.pay.timeout_ms", "less than or equal to 600000"),
        (SERVER + 'timeout_ms = "5"\n', "servers.pay.timeout_ms", "whole number"),
        (SERVER + "timeout_ms = 5.0\n", "servers.pay.timeout_ms", "whole number"),
        (SERVER + "timeout_ms = true\n", "servers.pay.timeout_ms", "whole number"),
        (SERVER + "max_attempts = 0\n", "servers.pay.max_attempts", "greater than or equal to 1"),
        (SERVER + "max_attempts = 101\n", "servers.pay.max_attempts", "less than or equal to 100"),
        (SERVER + 'tenant = ""\n', "servers.pay.tenant", "at least 1 character"),
        (SERVER + "[servers.pay.tools.charge]\n", "servers.pay.tools.charge.class", "the field"),
        (
            SERVER + '[servers.pay.tools.charge]\nclass = "wirte"\n',
            "servers.pay.tools.charge.class",
            "'read' or 'write'",
        ),
        (SERVER + '[servers.pay.tools."a b"]\nclass = "read"\n', "servers.pay.tools.a b", "pattern"),
        (SERVER + '[servers.pay.tools.".."]\nclass = "read"\n', "servers.pay.tools...", "segment of a URL"),
        (SERVER.replace("servers.pay", 'servers.""'), "servers.", "at least 1 character"),
        (CHARGE + 'on_unknown_outcome = "retry"\n', "charge.on_unknown_outcome", "'redispatch', 'reconcile' or 'hold'"),
        (CHARGE + 'tags = "approval"\n', "charge.tags", "list"),
        (CHARGE + "input_schema = true\n", "charge.input_schema", "table"),
        (CHARGE + "approval_timeout_ms = 999\n", "charge.approval_timeout_ms", "greater than or equal to 1000"),
        (CHARGE + "approval_timeout_ms = 31536000001\n", "charge.approval_timeout_ms", "less than or equal to"),
        (SERVER + "max_concurrency = 0\n", "servers.pay.max_concurrency", "greater than or equal to 1"),
        (SERVER + "max_concurrency = 1025\n", "servers.pay.max_concurrency", "less than or equal to 1024"),
        (SERVER + "max_in_flight = 0\n", "servers.pay.max_in_flight", "greater than or equal to 1"),
        (SERVER.replace("pay", '"acme/pay"'), "servers.acme/pay", "without /"),
        (SERVER.replace("pay", '".."'), "servers...", "without /"),
        (SERVER + 'tenant = "a/b"\n', "servers.pay.tenant", "without /"),
        ('[tenants."a/b"]\n', "tenants.a/b", "without /"),
        ('[tenants."a b"]\n', "tenants.a b", "pattern"),
        (SERVER + f'tenant = "{"t" * (NAME_CHARS_MAX - 3)}"\n', "servers.pay", "with its tenant's"),
        ('[policy]\nfile = "none.cedar"\n', "policy.file", "a file that can be read"),
        ('[policy]\nfile = "."\n', "policy.file", "a file that can be read"),
        ("[policy]\nfile = 1\n", "policy.file", "a path"),
        ('[policy]\nfile = ""\n', "policy.file", "a path"),
        ("[webhooks.a]\n", "webhooks.a.url", "the field"),
        ('[webhooks."a b"]\nurl = "http://h"\n', "webhooks.a b", "pattern"),
        (JWT + "algorithms = []\njwks_file = 'tga.toml'\n", "auth.jwt.algorithms", "at least 1"),
        (JWT + "algorithms = ['HS256']\njwks_file = 'tga.toml'\n", "auth.jwt.algorithms.0", "'EdDSA'"),
        (JWT + "algorithms = ['none']\njwks_file = 'tga.toml'\n", "auth.jwt.algorithms.0", "'EdDSA'"),
        (JWT + "jwks_file = 'tga.toml'\n", "auth.jwt.algorithms", "the field"),
        (EDDSA, "auth.jwt", "either jwks_url or jwks_file"),
        (EDDSA + "jwks_file = 'tga.toml'\njwks_url = 'https://h'\n", "auth.jwt", "either jwks_url or jwks_file"),
        (EDDSA + "jwks_file = 'none.json'\n", "auth.jwt.jwks_file", "a file that can be read"),
        (EDDSA + "jwks_url = 'http://id.example.org/jwks'\n", "auth.jwt.jwks_url", "https://"),
        (EDDSA + "jwks_file = 'tga.toml'\nprincipal_claim = ''\n", "auth.jwt.principal_claim", "at least 1"),
        ('[log]\norigin = "two words"\n', "log.origin", "pattern"),
        ('[log]\norigin = "a+b"\n', "log.origin", "pattern"),
        ('[log]\norigin = ""\n', "log.origin", "pattern"),
        ("[limits]\nburst = 0\n", "limits.burst", "greater than or equal to 1"),
        ("[limits]\nrequests_per_second = 1.5\n", "limits.requests_per_second", "whole number"),
        ("[limits]\nin_flight = 1000001\n", "limits.in_flight", "less than or equal to"),
        (SERVER.replace("pay", f'"{"x" * 5000}"'), "servers.xxx", "at most 128"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(tmp_path: Path, text: str, field: str, expected: str) -> None:
    message = refused(tmp_path, text)
    assert field in message
    assert expected in message
    assert len(message) < 800


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "127.0.0.1:9001",
        "ftp://h",
        "http://",
        "http:///x",
        "http://h:99999",
        "http://user:hunter2@h",
        "http://h/?q=1",
        "http://h?",
        "http://h#f",
        "http://h/a b",
        "file:///x",
        "unix://x",
    ],
)
def test_a_base_url_that_cannot_be_one_is_refused_without_showing_it(tmp_path: Path, base_url: str) -> None:
    message = refused(tmp_path, f'[servers.pay]\ntransport = "http"\nbase_url = "{base_url}"\n')
    assert "servers.pay.base_url" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("base_url", ["http://h", "https://h/", "http://[::1]:80/a/b", "http://example.org:8421/x/"])
def test_a_base_url_may_have_a_port_and_a_path(tmp_path: Path, base_url: str) -> None:
    loaded = load(tmp_path, f'[servers.pay]\ntransport = "http"\nbase_url = "{base_url}"\n')
    assert loaded.servers["pay"].base_url == base_url


@pytest.mark.parametrize("url", ["http://user:hunter2@h/", "https://h/#hunter2", "ftp://hunter2", "h?hunter2", ""])
def test_a_webhook_url_may_have_a_query_but_no_user_and_is_never_shown(tmp_path: Path, url: str) -> None:
    message = refused(tmp_path, f'[webhooks.a]\nurl = "{url}"\n')
    assert "webhooks.a.url" in message
    assert "hunter2" not in message
    config = load(tmp_path, '[webhooks.a]\nurl = "https://h/x?token=hunter2"\n')
    assert "hunter2" not in repr(config)


MCP_STDIO = '[servers.f]\ntransport = "mcp-stdio"\ncommand = ["node", "server.js"]\n'
MCP_HTTP = '[servers.g]\ntransport = "mcp-http"\nurl = "http://h/mcp"\n'


def test_mcp_servers_need_no_tools_and_run_in_the_folder_of_the_file(tmp_path: Path) -> None:
    text = MCP_STDIO + '[servers.f.tools.write]\non_unknown_outcome = "hold"\n' + MCP_HTTP
    servers = load(tmp_path, text).servers
    assert servers["f"].command == ["node", "server.js"]
    assert servers["f"].tools["write"].tool_class is None
    assert servers["g"].url == "http://h/mcp"


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ('[servers.f]\ntransport = "mcp-stdio"\n', "servers.f.command", "the field"),
        ('[servers.g]\ntransport = "mcp-http"\n', "servers.g.url", "the field"),
        ('[servers.f]\ntransport = "mcp-stdio"\ncommand = []\n', "servers.f.command", "at least 1"),
        (MCP_STDIO + 'url = "http://h/"\n', "servers.f.url", "mcp-http"),
        (MCP_STDIO + "credentials = {}\n", "servers.f.credentials", "http or mcp-http"),
        (MCP_HTTP + 'base_url = "http://h/"\n', "servers.g.base_url", "http"),
        (MCP_HTTP + "env = {}\n", "servers.g.env", "mcp-stdio"),
        (MCP_HTTP + 'protocol_version = "2024-11-05"\n', "servers.g.protocol_version", "2026-07-28"),
        (MCP_HTTP + "[servers.g.tools.a]\ninput_schema = {}\n", "servers.g.tools.a.input_schema", "describes"),
        (MCP_HTTP + '[servers.g.tools.a]\ndescription = "x"\n', "servers.g.tools.a.description", "describes"),
        (
            MCP_HTTP + '[servers.g.tools.a]\non_unknown_outcome = "reconcile"\nreconcile_tool = "b"\n',
            "servers.g.tools.a.reconcile_tool",
            "a read-class tool",
        ),
        (SERVER + "trust_annotations = true\n", "servers.pay.trust_annotations", "mcp-stdio or mcp-http"),
        (SERVER + "[servers.pay.tools.a]\n", "servers.pay.tools.a.class", "the field"),
    ],
)
def test_a_field_of_another_transport_is_refused(tmp_path: Path, text: str, field: str, expected: str) -> None:
    message = refused(tmp_path, text)
    assert field in message
    assert expected in message


def test_what_an_mcp_child_is_given_is_never_shown(tmp_path: Path) -> None:
    assert "hunter2" not in refused(tmp_path, MCP_STDIO + 'env = { A = ["hunter2"] }\n')
    assert "hunter2" not in repr(load(tmp_path, MCP_STDIO + 'env = { A = "hunter2" }\n'))


@pytest.mark.parametrize(
    "pointers",
    ['[""]', '["/"]', '["card"]', '["/a/"]', '["//a"]', '["/a~2"]', '["/a~"]', '["#/a"]', '["/a", "/a"]',
     '["/a", "/a/b"]', '["/x/y/z", "/b", "/x"]', '["/a~1b", "/a~1b/c"]', "[1]", '"/a"', f'["/{"x" * 256}"]',
     str([f"/{n}" for n in range(17)])],
)  # fmt: skip
def test_a_pointer_to_a_secret_that_cannot_be_one_is_refused(tmp_path: Path, pointers: str) -> None:
    assert "servers.pay.tools.charge.secret_arguments" in refused(tmp_path, CHARGE + f"secret_arguments = {pointers}\n")


@pytest.mark.parametrize("pointers", ['["/a", "/b/a", "/ab"]', '["/a/b", "/a/c", "/a~1b"]', "[]"])
def test_pointers_to_different_values_are_taken(tmp_path: Path, pointers: str) -> None:
    load(tmp_path, CHARGE + f"secret_arguments = {pointers}\n")


def test_a_misspelt_pointer_to_a_secret_is_found_where_the_schema_is_closed(tmp_path: Path) -> None:
    closed = "{ properties = { card = { properties = { number = {} }, additionalProperties = false } }, "
    closed += "additionalProperties = false }"
    for pointer, hint in (("/crad", "such as card"), ("/card/numbr", "such as number")):
        message = refused(tmp_path, with_schema(closed) + f'secret_arguments = ["{pointer}"]\n')
        assert "servers.pay.tools.charge.secret_arguments" in message
        assert hint in message
    for pointer in ("/card", "/card/number", "/card/number/x"):
        load(tmp_path, with_schema(closed) + f'secret_arguments = ["{pointer}"]\n')
    load(tmp_path, with_schema("{ properties = { card = {} } }") + 'secret_arguments = ["/other"]\n')


@pytest.mark.parametrize(
    "header",
    ["Idempotency-Key", "idempotency-key", "TGA-Trace-Id", "tga-x", "traceparent", "Tracestate", "Host", "Content-Type",
     "content-length", "Transfer-Encoding", "Connection", "Expect", "User-Agent", "Accept-Encoding", "Proxy-X",
     "a b", "a:", "", "é", "x" * 65],
)  # fmt: skip
def test_a_credential_is_no_header_of_the_gateways_own(tmp_path: Path, header: str) -> None:
    message = refused(tmp_path, SERVER + f'[servers.pay.credentials]\n"{header}" = {{ env = "A" }}\n')
    assert "servers.pay.credentials" in message


@pytest.mark.parametrize(
    "source",
    ['"hunter2"', '["hunter2"]', "{}", '{ env = "A", file = "hunter2" }', '{ env = "hunter2 x" }', '{ env = "" }',
     '{ value = "hunter2" }', '{ env = "A", prefix = "hunter2\\n" }', '{ file = ["hunter2"] }',
     '{ prefix = "hunter2" }'],
)  # fmt: skip
def test_a_credential_that_is_written_wrong_is_named_but_not_shown(tmp_path: Path, source: str) -> None:
    message = refused(tmp_path, SERVER + f"[servers.pay.credentials]\nAuthorization = {source}\n")
    assert "servers.pay.credentials.Authorization" in message
    assert "hunter2" not in message


def test_headers_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    text = SERVER + '[servers.pay.credentials]\nX-Key = { env = "A" }\nx-key = { env = "A" }\n'
    assert "each header once" in refused(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        CHARGE + 'on_unknown_outcome = "reconcile"\n' + STATUS,
        CHARGE + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "other"\n' + STATUS,
        CHARGE + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "charge"\n' + STATUS,
        CHARGE + 'reconcile_tool = "status"\n' + STATUS,
        CHARGE
        + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "status"\n'
        + (SERVER + STATUS).replace("servers.pay", "servers.other"),
    ],
    ids=["none-named", "unknown", "write-class", "without-reconcile", "of-another-server"],
)
def test_reconcile_needs_a_read_tool_of_the_same_server(tmp_path: Path, text: str) -> None:
    assert "servers.pay.tools.charge.reconcile_tool" in refused(tmp_path, text)


def test_a_description_that_cannot_be_pinned_is_refused(tmp_path: Path) -> None:
    described = with_schema("{}") + 'description = "\\u0000"\n'
    assert "servers.pay.tools.charge.description: a string holds NUL" in refused(tmp_path, described)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ('{ type = "objet" }', "at /type"),
        ('{ properties = { a = { pattern = "(" } } }', "at /properties/a/pattern"),
        ('{ "$ref" = "https://example.org/s" }', "a local reference"),
        ('{ properties = { a = { "$dynamicRef" = "other.json" } } }', "a local reference"),
        ('{ "$ref" = "#/$defs/none" }', "a part of this schema"),
        ('{ "$ref" = "#none" }', "a part of this schema"),
        ('{ properties = { a = { "$id" = "x" } } }', "$id at the top only"),
        ('{ "$schema" = "http://json-schema.org/draft-07/schema#" }', "2020-12"),
        ('{ "$ref" = "#" }', "in a circle"),
        ("{ minimum = nan }", "a number"),
        ("{ const = 2026-01-01 }", "date"),
        ("{ const = 9007199254740993 }", "an integer of that size"),
        (f'{{ description = "{"x" * INPUT_SCHEMA_BYTES_MAX}" }}', "at most"),
        (f"{{ const = {'[' * ENCLOSED_DEPTH_MAX}{']' * ENCLOSED_DEPTH_MAX} }}", "nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(tmp_path: Path, schema: str, expected: str) -> None:
    message = refused(tmp_path, with_schema(schema))
    assert "servers.pay.tools.charge.input_schema" in message
    assert expected in message
    assert len(message) < 1000


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=r"none\.toml.*No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(SettingInvalid, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize("raw", [b"[servers", b"\xff", b"a = 1\na = 2\n", b"a = " + b"[" * 5000])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "tga.toml"
    path.write_bytes(raw)
    with pytest.raises(SettingInvalid, match=r"tga\.toml is not TOML"):
        load_config(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    assert "too large" in refused(tmp_path, "#" * (CONFIG_BYTES_MAX + 1))
