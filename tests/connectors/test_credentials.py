"""Credentials for tool servers: from environment and files into the request, and nowhere else."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.connectors.credentials import Credentials
from app.connectors.http import HttpConnector
from app.connectors.registry import Registry
from app.core.errors import SettingInvalid
from app.domain.tga.ports import Answered, NotSent, Unknown
from tests.connectors.servers import Raw, always, effect_of, raw_server, response, tool_call

SECRET = "hunter2-zq9"  # noqa: S105


def registry_for(tmp_path: Path, raw_url: str, credentials: str, environment: dict[str, str]) -> Registry:
    path = tmp_path / "tga.toml"
    path.write_text(
        f'[servers.pay]\ntransport = "http"\nbase_url = "{raw_url}"\n'
        f"[servers.pay.credentials]\n{credentials}\n"
        '[servers.pay.tools.charge]\nclass = "write"\n'
    )
    return Registry.from_config(load_config(path), environment=environment)


def sent(raw: Raw, number: int = -1) -> dict[str, str]:
    head = raw.requests[number].partition(b"\r\n\r\n")[0].decode()
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}


def everything_of(thing: object, depth: int = 6) -> str:
    """Its repr and str, and those of what it holds: what a log line, a debugger or an error report may show."""
    said = [repr(thing), str(thing)]
    if depth:
        held = dict(getattr(thing, "__dict__", {}))
        held |= {name: getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())}
        for name, value in held.items():
            if type(value).__module__.startswith("app.") or isinstance(value, dict):
                said += [name, everything_of(value, depth - 1)]
        if isinstance(thing, dict):
            said += [everything_of(value, depth - 1) for value in thing.values()]
    return "\n".join(said)


async def test_values_from_environment_and_file_go_into_their_headers(tmp_path: Path) -> None:
    (tmp_path / "pay.key").write_text(f" {SECRET}\r\n")
    credentials = 'Authorization = { env = "T", prefix = "Bearer " }\nX-Api-Key = { file = "pay.key" }'
    async with raw_server(always(response("200 OK"))) as raw:
        registry = registry_for(tmp_path, raw.url, credentials, {"T": "abc def"})
        assert isinstance(await registry.of("pay").dispatch(tool_call(), timeout_ms=5000), Answered)
        await registry.close()
    assert sent(raw)["authorization"] == "Bearer abc def"
    assert sent(raw)["x-api-key"] == SECRET
    assert sent(raw)["idempotency-key"] == "key-1"


async def test_one_servers_credentials_are_not_shown_to_another(tmp_path: Path) -> None:
    async with raw_server(always(response("200 OK"))) as raw:
        registry = registry_for(
            tmp_path,
            raw.url,
            f'Authorization = {{ env = "T" }}\n[servers.crm]\ntransport = "http"\nbase_url = "{raw.url}"',
            {"T": SECRET},
        )
        await registry.of("pay").dispatch(tool_call(), timeout_ms=5000)
        await registry.of("crm").dispatch(tool_call(), timeout_ms=5000)
        await registry.close()
    assert [SECRET.encode() in request for request in raw.requests] == [True, False]


async def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    key = tmp_path / "pay.key"
    key.write_text("one")
    async with raw_server(always(response("200 OK"))) as raw:
        registry = registry_for(tmp_path, raw.url, 'X-Key = { file = "pay.key" }', {})
        line = registry.of("pay")
        await line.dispatch(tool_call(), timeout_ms=5000)
        stamp = os.stat(key)
        key.write_text("two")  # of the same size
        os.utime(key, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
        await line.dispatch(tool_call(), timeout_ms=5000)
        (tmp_path / "new").write_text("six")
        os.utime(tmp_path / "new", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
        os.replace(tmp_path / "new", key)  # another file with the same time and size
        await line.dispatch(tool_call(), timeout_ms=5000)
        await registry.close()
    assert [sent(raw, n)["x-key"] for n in range(3)] == ["one", "two", "six"]


@pytest.mark.parametrize("later", [None, "", " \n", f"{SECRET}\nX: y", f"{SECRET}é", "x" * 8193])
async def test_a_file_that_cannot_be_used_later_means_that_nothing_was_sent(tmp_path: Path, later: str | None) -> None:
    key = tmp_path / "pay.key"
    key.write_text(SECRET)
    async with raw_server(always(response("200 OK"))) as raw:
        registry = registry_for(tmp_path, raw.url, 'X-Key = { file = "pay.key" }', {})
        key.unlink()
        if later is not None:
            key.write_text(later)
        result = await registry.of("pay").dispatch(tool_call(), timeout_ms=5000)
        assert isinstance(result, NotSent)
        assert "pay.key" in result.detail
        assert SECRET not in repr(result)
        assert raw.requests == []
        assert registry.servers()[0].health.last_failure_kind == "not_sent"
        key.write_text("back")  # and nothing has to be restarted
        assert isinstance(await registry.of("pay").dispatch(tool_call(), timeout_ms=5000), Answered)
        await registry.close()


@pytest.mark.parametrize(
    ("credentials", "environment"),
    [
        ('X-Key = { env = "T" }', {}),
        ('X-Key = { env = "T" }', {"T": ""}),
        ('X-Key = { env = "T" }', {"T": f"{SECRET}\r\nX: y"}),
        ('X-Key = { env = "T" }', {"T": f"{SECRET} "}),
        ('X-Key = { env = "T" }', {"T": f"{SECRET}\x00"}),
        ('X-Key = { env = "T" }', {"T": f"{SECRET}é"}),
        ('X-Key = { env = "T" }', {"T": SECRET * 1000}),
        ('X-Key = { env = "T", prefix = " " }', {"T": SECRET}),
        ('X-Key = { file = "none" }', {}),
        ('X-Key = { file = "." }', {}),
        ('X-Key = { file = "two-lines" }', {}),
        ('X-Key = { file = "empty" }', {}),
    ],
)
def test_a_credential_that_is_not_there_at_the_start_is_named_but_not_shown(
    tmp_path: Path, credentials: str, environment: dict[str, str]
) -> None:
    (tmp_path / "two-lines").write_text(f"{SECRET}\n{SECRET}\n")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SettingInvalid) as caught:
        registry_for(tmp_path, "http://127.0.0.1:9", credentials, environment)
    assert f"{tmp_path / 'tga.toml'}: servers.pay.credentials.X-Key" in str(caught.value)
    assert SECRET not in everything_of(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "answer",
    [
        response("200 OK", b"{}"),
        response("401 Unauthorized"),
        response("302 Found", b"", "Location: http://127.0.0.1:9/"),
        response("503 Later"),
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
    ids=["ok", "unauthorized", "redirect", "later", "closed", "no-http", "huge"],
)
async def test_a_credential_is_in_nothing_that_comes_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], answer: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "pay.key").write_text(f"file-{SECRET}")
    credentials = 'Authorization = { env = "T", prefix = "Bearer " }\nX-Api-Key = { file = "pay.key" }'
    async with raw_server(answer) as raw:
        registry = registry_for(tmp_path, raw.url, credentials, {"T": f"env-{SECRET}"})
        result = await registry.of("pay").dispatch(tool_call(), timeout_ms=5000)
        said: list[Any] = [everything_of(thing) for thing in (registry, registry.of("pay"), registry.servers(), result)]
        said += [effect_of(result).to_bytes().decode(), caplog.text, *capfd.readouterr()]
        await registry.close()
    assert isinstance(result, Answered | Unknown)
    assert raw.requests[0].count(SECRET.encode()) == 2
    assert SECRET not in "\n".join(said)
    assert "SecretStr('**********')" in said[0]  # so the search did look at the place


async def test_a_credential_is_not_told_when_the_connection_fails(tmp_path: Path) -> None:
    registry = registry_for(tmp_path, "http://127.0.0.1:1", 'X-Key = { env = "T" }', {"T": SECRET})
    result = await registry.of("pay").dispatch(tool_call(), timeout_ms=5000)
    await registry.close()
    assert isinstance(result, NotSent)
    assert SECRET not in repr(result)


async def test_without_credentials_there_are_none() -> None:
    assert Credentials({}, {}).headers() == {}
    async with raw_server(always(response("200 OK"))) as raw:
        connector = HttpConnector(raw.url)
        await connector.dispatch(tool_call(), timeout_ms=5000)
        await connector.close()
    assert "authorization" not in sent(raw)
