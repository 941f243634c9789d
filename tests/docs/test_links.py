"""What the documents point at is there: files, headings, commands of `tga` and their options, variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from app.cli.command import Later
from app.cli.command import command as tga

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "schemas/**/*.md", "sdk/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
)
WITH_COMMANDS = [Path("README.md"), Path("SECURITY.md"), Path("CONTRIBUTING.md"), *DOCUMENTS]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# In code: `tga keys create NAME --role agent`, .venv/bin/tga verify --all
_COMMAND = re.compile(r"(?:^|[\s`(|;$])(?:\.venv/bin/)?tga((?: +[^\s`|;)]+)+)", re.MULTILINE)
_OTHERS = re.compile(r"^claude .*$", re.MULTILINE)  # a client's own command, in which a server is named tga
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def anchor_of(heading: str) -> str:
    """As code forges make them of headings."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return kept.replace(" ", "-")


def anchors_in(text: str) -> set[str]:
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)}


def broken_links(document: Path) -> list[str]:
    text = _FENCE.sub("", document.read_text("utf-8"))
    broken = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere
        path, _, anchor = target.partition("#")
        found = document if not path else document.parent / path
        if not found.exists() or (anchor and anchor not in anchors_in(found.read_text("utf-8"))):
            broken.append(target)
    return broken


def commands_in(text: str) -> list[list[str]]:
    """Every use of `tga` in code, as its words; comments behind it are none of them."""
    return [
        found.split(" #")[0].split()
        for code in _CODE.findall(text)
        for found in _COMMAND.findall(_OTHERS.sub("", code))
        if not found.strip().startswith(("#", "="))
    ]


def misfit(words: list[str]) -> str | None:
    """What of these words the command does not know; None when it knows them all."""
    command: Any = tga
    options = _options(command)
    for word in words:
        if word.startswith("-"):
            if word.split("=")[0] not in options:
                return f"{' '.join(words)}: no option {word}"
        elif isinstance(command, TyperGroup) and re.fullmatch("[a-z-]+", word):
            inner = command.commands.get(word)
            if inner is None:
                return f"{' '.join(words)}: no command {word}"
            command = inner.load() if isinstance(inner, Later) else inner
            options = _options(command)
    return None


def _options(command: Any) -> set[str]:
    return {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken_links(ROOT / document) == []


@pytest.mark.parametrize("document", sorted(set(WITH_COMMANDS)), ids=str)
def test_every_command_and_option_that_is_named_exists(document: Path) -> None:
    named = commands_in((ROOT / document).read_text("utf-8"))
    assert [wrong for words in named if (wrong := misfit(words)) is not None] == []


def test_every_command_is_in_its_document() -> None:
    assert isinstance(tga, TyperGroup)
    named = {words[0] for words in commands_in((ROOT / "docs" / "commands.md").read_text("utf-8"))}
    assert sorted(tga.commands.keys() - named) == []


def test_every_environment_variable_that_is_named_is_read_somewhere() -> None:
    trees = ("app/**/*.py", "sdk/**/*.py", "tests/*.py")
    sources = "".join(path.read_text("utf-8") for tree in trees for path in ROOT.glob(tree))
    for document in DOCUMENTS:
        named = set(re.findall(r"\bTGA_[A-Z_]+\b", (ROOT / document).read_text("utf-8")))
        assert sorted(name for name in named if name not in sources) == [], document


def test_a_link_or_a_command_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A page\n[a](#a-page) [b](#nothing) [c](gone.md) [d](https://example.org)\n", "utf-8")
    assert broken_links(document) == ["#nothing", "gone.md"]
    text = "`tga verify --all`, `tga keys rotate signing`\n\n```\ntga keys melt\ntga erase ID --now  # never\n```\n"
    wrong = [misfit(words) for words in commands_in(text)]
    assert wrong == [None, None, "keys melt: no command melt", "erase ID --now: no option --now"]


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200
