"""What a person reads who checks a policy, or asks why a call was denied."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from app.cli.policy import check_policy, explain_policy
from app.core.errors import SettingInvalid
from app.gateway.policy_file import load_policy, packaged_policy_text
from tests.policy.asking import request_of, tool_of

CONFIG = Path(str(resources.files("app.demo").joinpath("tga.toml")))
POLICY = """// Rules of the bank.
@id("may-call")
permit(principal, action == Action::"call", resource);

@id("small-alone")
permit(principal, action == Action::"call_unattended", resource == Tool::"bank/charge")
when { context.arguments.amount <= 100 };

@id("no-reports")
forbid(principal, action, resource == Tool::"bank/report");

@id("not-to-eve") @permit("(;") // a comment with forbid(
forbid(principal, action, resource)
when { context.arguments has to && context.arguments.to like "*[eve]*" };
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.cedar"
    file.write_text(POLICY)
    return file


async def test_check_shows_what_a_valid_file_holds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await check_policy(path, config=CONFIG, as_json=False)
    told = capsys.readouterr().out
    assert f"valid  4 policies, digest {load_policy(path).digest}" in told
    assert "permit may-call, line 2" in told
    assert "forbid not-to-eve, line 12" in told
    assert await check_policy(path, config=CONFIG, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is True
    assert document["policies"][1] == {"id": "small-alone", "effect": "permit", "line": 5}


async def test_check_names_the_line_of_a_mistake(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(POLICY.replace('action == Action::"call",', 'action == Action::"cal",'))
    assert not await check_policy(path, config=CONFIG, as_json=False)
    assert f'{path}, line 2: there is no Action::"cal"' in capsys.readouterr().out
    path.write_text(POLICY + "permit(principal action);")
    assert not await check_policy(path, config=CONFIG, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is False
    assert f"{path}, line 15: unexpected token `action`" in document["error"]


async def test_check_warns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(POLICY + 'permit(principal, action, resource) when { context.intent == "[x]" };')
    assert await check_policy(path, config=CONFIG, as_json=False)
    assert "warning  line 15: policy4 reads context.intent" in capsys.readouterr().out


TENANTS = """
[tenants.other]
[servers.bank]
transport = "http"
base_url = "http://127.0.0.1:9"
[servers.bank.tools.charge]
class = "write"
[servers.bank.tools.report]
class = "write"
[servers.theirs]
transport = "http"
base_url = "http://127.0.0.1:9"
tenant = "other"
[servers.theirs.tools.charge]
class = "write"
[servers.notes]
transport = "mcp-stdio"
command = ["nothing-of-this-name"]
[servers.notes.tools.add]
secret_arguments = ["/text"]
"""


async def test_check_compares_the_file_with_the_configured_tools_and_stays_valid(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tga.toml"
    config.write_text(TENANTS)
    assert await check_policy(path, config=config, as_json=True)
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    path.write_text(
        POLICY
        + '@id("theirs") forbid(principal, action, resource == Tool::"other/theirs/charge");'
        + '@id("undiscovered") forbid(principal, action, resource == Tool::"notes/remove");'
        + '@id("secret") forbid(principal, action, resource == Tool::"notes/add")'
        + 'when { context.arguments.text == "" };'
    )
    assert await check_policy(path, config=config, as_json=True)
    theirs, secret = json.loads(capsys.readouterr().out)["warnings"]
    assert theirs.startswith("line 15: theirs names ")
    assert theirs.endswith('Write Tool::"other%2Ftheirs/charge".')
    assert secret.startswith('line 15: secret reads context.arguments.text, where Tool::"notes/add" has a secret')
    assert await check_policy(path, config=config, as_json=False)
    assert f"warning  {theirs}" in capsys.readouterr().out
    config.write_text("[servers")
    assert await check_policy(path, config=config, as_json=True)
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("not compared with the tools that there are: ")


def test_explain_writes_ids_as_rules_must(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool, request = tool_of(server_id="other/theirs"), request_of(server_id="other/theirs")
    explain_policy(path, tool, request, as_json=True)
    resource = json.loads(capsys.readouterr().out)["resource"]
    assert resource == 'Tool::"other%2Ftheirs/charge"'
    path.write_text(POLICY + f'@id("pasted") forbid(principal, action, resource == {resource});')
    assert not explain_policy(path, tool, request, as_json=False)
    told = capsys.readouterr().out
    assert "because forbidden by pasted" in told
    assert f"tool      {resource} (write" in told


async def test_check_of_a_file_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid):
        await check_policy(tmp_path / "none.cedar", config=CONFIG, as_json=False)


async def test_the_packaged_policy_is_checked_without_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check_policy(None, config=CONFIG, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [rule["id"] for rule in document["policies"]] == [
        "every-tool",
        "unattended-without-approval-tag",
        "agents-and-operators-start",
        "agents-and-operators-submit",
    ]
    assert document["warnings"] == []
    assert packaged_policy_text().isascii()


def test_explain_shows_the_rule_that_forbids_with_its_text_and_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of({"amount": 5, "to": "to [eve]!"})
    assert not explain_policy(path, tool_of("money"), request, as_json=False)
    told = capsys.readouterr().out
    assert told.startswith("DENY  the call is not made\nbecause forbidden by not-to-eve\n")
    assert 'asked by  Principal::"default/agent-1" (no roles)' in told
    assert 'tool      Tool::"bank/charge" (write, money)' in told
    assert '  decides: forbid not-to-eve, line 12\n      12 | @id("not-to-eve") @permit' in told
    assert 'like "*[eve]*" };' in told
    assert "applies: permit may-call, line 2" in told
    assert "2 more not about this request" in told
    assert "call_unattended  " not in told


def test_explain_shows_why_a_person_is_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_policy(path, tool_of(), request_of({"amount": 500}), as_json=False)
    told = capsys.readouterr().out
    assert told.startswith("ASK  the call waits for a person\nbecause no policy permits this call unattended\n")
    assert "condition not met: permit small-alone, line 5" in told


def test_explain_shows_what_could_not_be_evaluated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not explain_policy(path, tool_of(), request_of({"to": 7}), as_json=False)
    told = capsys.readouterr().out
    assert "because not-to-eve could not be evaluated: type error: expected string, got long" in told
    assert "could not be evaluated: forbid not-to-eve, line 12" in told


def test_explain_as_json_says_the_same_for_programs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_policy(path, tool_of(), request_of({"amount": 5}), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "allow"
    assert document["policy_ids"] == ["may-call", "small-alone"]
    call, unattended = document["actions"]["call"], document["actions"]["call_unattended"]
    assert {rule["id"]: rule["standing"] for rule in call["policies"]} == {
        "may-call": "decides",
        "small-alone": "not about this request",
        "no-reports": "not about this request",
        "not-to-eve": "condition not met",
    }
    assert {rule["id"]: rule["standing"] for rule in unattended["policies"]}["small-alone"] == "decides"
    assert not explain_policy(path, tool_of(), request_of({"to": 7}), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["actions"]["call"]["errors"] == [
        {"id": "not-to-eve", "reason": "type error: expected string, got long"}
    ]


def test_explain_of_what_cannot_be_put_to_the_policy_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not explain_policy(path, tool_of(tool_name="refund"), request_of(), as_json=False)
    assert "because the request is for another tool" in capsys.readouterr().out
