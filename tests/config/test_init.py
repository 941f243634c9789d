"""`tga init`: what it writes works as it is, shows every option, and never replaces what is there unasked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from app.cli.init import write_config
from app.config import Config, load_config
from app.config.tables import ADDRESS_FIELDS, TRANSPORTS_OF_FIELD, Transport
from app.connectors.registry import Registry
from app.core.errors import SettingInvalid

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def fields_of(table: type[BaseModel]) -> set[str]:
    found = set()
    for name, field in table.model_fields.items():
        found.add(field.alias or name)
        for inner in tables_in(field.annotation):
            found |= fields_of(inner)
    return found


def tables_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in tables_in(inner)]


def test_what_is_written_loads_as_it_is(tmp_path: Path) -> None:
    path = write_config(tmp_path / "new" / "home", force=False)
    assert path == tmp_path / "new" / "home" / "tga.toml"
    config = load_config(path)
    assert config.policy is not None
    assert config.policy.file.read_bytes()
    registry = Registry.from_config(config, environment={})
    assert {tool.tool_name for tool in registry.tools()} == {"charge", "charge_status"}


def test_every_option_is_shown_and_works_when_its_sign_is_removed(tmp_path: Path) -> None:
    path = write_config(tmp_path, force=False)
    text = re.sub(r"^#(?=[\w\[])", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(text)
    (tmp_path / "jwks.json").write_text("{}")
    (tmp_path / "pay.key").write_text("k")
    Registry.from_config(load_config(path), environment={"PAY_TOKEN": "t", "FILES_TOKEN": "t"})
    missing = {name for name in fields_of(Config) if not re.search(rf"\b{name}\b", text)}
    assert missing == set()


def test_every_transport_has_an_address_and_is_shown(tmp_path: Path) -> None:
    transports = set(get_args(Transport))
    assert set(ADDRESS_FIELDS) == transports
    assert {name for names in TRANSPORTS_OF_FIELD.values() for name in names} == transports
    for text in (write_config(tmp_path, force=False).read_text(), DOCUMENT.read_text("utf-8")):
        assert {name for name in transports if f'"{name}"' not in text} == set()


def test_the_defaults_that_are_shown_are_the_defaults(tmp_path: Path) -> None:
    path = write_config(tmp_path, force=False)
    text = path.read_text()
    for line in ("timeout_ms", "max_attempts", "max_concurrency", "max_in_flight"):
        plain = load_config(path).servers["pay"]
        path.write_text(re.sub(rf"^#(?={line} )", "", text, count=1, flags=re.MULTILINE))
        assert load_config(path).servers["pay"] == plain
    path.write_text(text[: text.index("# Where back-pressure begins.")])
    plain_limits = load_config(path).limits
    path.write_text(
        re.sub(r"^#(?=[\w\[])", "", text[text.index("# Where back-pressure begins.") :], flags=re.MULTILINE)
    )
    assert load_config(path).limits == plain_limits
    assert load_config(path).limits.model_fields_set


@pytest.mark.parametrize("there", ["tga.toml", "policy.cedar"])
def test_what_is_there_is_not_replaced_unasked(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(SettingInvalid, match=r"is there already.*--force"):
        write_config(tmp_path, force=False)
    assert {file.name for file in tmp_path.iterdir()} == {there}
    assert (tmp_path / there).read_text() == "mine"
    write_config(tmp_path, force=True)
    assert (tmp_path / there).read_text() != "mine"
    load_config(tmp_path / "tga.toml")


def test_a_home_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        with pytest.raises(SettingInvalid, match="cannot be written to"):
            write_config(home, force=False)
