"""What is built: one top-level name each, one version for both, the same wheel from a clone and from an sdist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from app import __version__
from tests.packaging.installed import ROOT, build, build_all

# Imported under another name than the distribution's, or coming with one that is pinned to it.
DISTRIBUTION_OF = {
    "jsonschema_rs": "jsonschema-rs",
    "jwt": "pyjwt",
    "opentelemetry": "opentelemetry-sdk",  # of the extra `otel`; without it nothing is traced, in words
    "pydantic_core": "pydantic",
    "pydantic_ai": "tga-sdk",  # for agents alone, of its extra `agents`; without it they are refused in words
    "tga_sdk": "tga-sdk",
    "tree_sitter": "tree-sitter",
    "tree_sitter_lua": "tree-sitter-lua",
    "uuid_utils": "uuid-utils",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build_all(folder)
    return folder


def wheel_of(name: str, folder: Path) -> Path:
    (found,) = folder.glob(f"{name}-*.whl")
    return found


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.mark.parametrize(("name", "top"), [("tga_gateway", "tga_gateway"), ("tga_sdk", "tga_sdk")])
def test_a_wheel_installs_one_name_of_its_own(name: str, top: str, built: Path) -> None:
    tops = {file.split("/")[0] for file in names_in(wheel_of(name, built))}
    assert tops == {top, f"{name}-{__version__}.dist-info"}


def test_the_wheel_has_all_of_the_gateway_and_nothing_that_serves_only_the_clone(built: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files belong to the clone, and this is none")
    packed = {name for name in names_in(wheel_of("tga_gateway", built)) if ".dist-info/" not in name}
    inside = {f"tga_gateway/{name}" for name in tracked("app", "schemas", "tools/verify.py")}
    assert packed == inside | tracked("tga_gateway")


def test_the_sdk_says_that_it_is_typed(built: Path) -> None:
    assert "tga_sdk/py.typed" in names_in(wheel_of("tga_sdk", built))


@pytest.mark.parametrize("name", ["tga_gateway", "tga_sdk"])
def test_an_sdist_builds_the_same_wheel_as_the_clone(name: str, built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob(f"{name}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / f"{name}-{__version__}", tmp_path / "again", "wheel")
    assert wheel_of(name, tmp_path / "again").read_bytes() == wheel_of(name, built).read_bytes()


def test_both_distributions_have_the_one_version_and_the_gateway_needs_its_sdk(built: Path) -> None:
    gateway, sdk = (metadata_of(wheel_of(name, built)) for name in ("tga_gateway", "tga_sdk"))
    assert gateway["Version"] == sdk["Version"] == __version__
    assert f"tga-sdk=={__version__}" in gateway.get_all("Requires-Dist", [])


@pytest.mark.parametrize("name", ["tga_gateway", "tga_sdk"])
def test_the_metadata_names_authors_and_licence_and_no_address(name: str, built: Path) -> None:
    metadata = metadata_of(wheel_of(name, built))
    assert metadata["Author"] == "TGA Gateway contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"Author-email", "Project-URL", "Home-page", "Download-URL"}.isdisjoint(metadata.keys())
    versions = [c for c in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", c)]
    assert "Programming Language :: Python :: 3.11" in versions


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]


def test_everything_that_the_gateway_imports_is_a_dependency_that_it_names(built: Path) -> None:
    """Not one that happens to come with another: its lower bound would be nobody's."""
    files = [*ROOT.glob("app/**/*.py"), *ROOT.glob("tga_gateway/*.py"), ROOT / "tools" / "verify.py"]
    imported = {name for path in files for name in imports_of(path)} - sys.stdlib_module_names - {"app", "tga_gateway"}
    required = metadata_of(wheel_of("tga_gateway", built)).get_all("Requires-Dist", [])
    named = {re.split(r"[^\w-]", text)[0] for text in required}
    assert {DISTRIBUTION_OF.get(name, name) for name in imported} - named == set()


def test_the_lock_files_name_no_host() -> None:
    for name in ("requirements.lock", "requirements-uv.lock"):
        assert "://" not in (ROOT / name).read_text("utf-8")


def test_every_dependency_has_a_lower_bound_and_uvicorn_an_upper_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    dependencies = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    assert [text for text in dependencies if not re.search(r"[>=]=", text)] == []
    (uvicorn,) = [text for text in dependencies if text.startswith("uvicorn")]
    assert "<" in uvicorn  # app/edge/protocol.py subclasses what uvicorn promises nobody


def test_a_commit_a_push_and_a_pull_request_are_checked_by_the_commands_of_this_clone() -> None:
    """Not by a list of their own, which would soon be another."""
    assert "- run: .ci/run\n" in (ROOT / ".github" / "workflows" / "check.yml").read_text("utf-8")
    assert "entry: make check\n" in (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    commands = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert {"make check", "make test"} <= set(commands)


def test_the_sdk_needs_two_distributions_and_all_others_are_extras(built: Path) -> None:
    metadata = metadata_of(wheel_of("tga_sdk", built))
    required = metadata.get_all("Requires-Dist", [])
    plain = {text for text in required if "extra ==" not in text}
    assert {re.split(r"[^\w-]", text)[0] for text in plain} == {"httpx2", "pydantic"}
    assert [text for text in required if ">=" not in text] == []
    assert {"pydantic-ai", "langchain", "openai-agents", "claude-agent", "sklearn", "onnx"} <= set(
        metadata.get_all("Provides-Extra", [])
    )
