"""Which gateway a client talks to, and with which key: as the command `tga` finds them, and to nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import Settings
from tga_sdk import AsyncClient, Client, SettingInvalid
from tga_sdk.settings import api_key, gateway_urls

ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"TGA_URL": "https://gateway.example:8443/"},
    {"TGA_HOST": "::1", "TGA_PORT": "9"},
    {"TGA_PORT": "9000"},
]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_address_is_the_one_that_the_command_uses(environment: dict[str, str]) -> None:
    assert gateway_urls(None, environment) == [Settings.from_environment(environment).url]


def test_the_key_is_given_or_of_the_environment_or_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("tga_machine\n")
    here = {"TGA_HOME": str(tmp_path)}
    assert api_key("tga_given", ["http://gateway.example"], here) == "tga_given"
    assert api_key(None, ["http://gateway.example"], {**here, "TGA_API_KEY": "tga_env"}) == "tga_env"
    assert api_key(None, ["http://127.0.0.1:8420"], here) == "tga_machine"
    assert api_key(None, ["http://localhost:8420", "http://[::1]:8420"], here) == "tga_machine"
    # The administrator's key of this machine is not sent to another one, not even among others.
    assert api_key(None, ["http://gateway.example"], here) is None
    assert api_key(None, ["http://127.0.0.1:8420", "http://gateway.example"], here) is None
    assert api_key(None, ["http://127.0.0.1:8420"], {"TGA_HOME": str(tmp_path / "nowhere")}) is None


@pytest.mark.parametrize(
    "url",
    ["", "gateway", "ftp://x", "http://", "http://u:p@x", "http://x?k=1", "http://x#f", "http://x:99999", "http://a b"],
)
def test_what_is_no_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingInvalid) as caught:
        gateway_urls(url)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "ümlaut", "x" * 10_000])
def test_what_is_no_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(SettingInvalid) as caught:
        api_key(key, ["http://127.0.0.1:8420"], {})
    assert not key or key not in str(caught.value)


def test_a_client_shows_its_address_and_not_its_key() -> None:
    for made in (Client("http://127.0.0.1:8420", "tga_secret"), AsyncClient("http://127.0.0.1:8420", "tga_secret")):
        assert "127.0.0.1:8420" in repr(made)
        assert "secret" not in repr(made)
