"""What importing the SDK costs: the standard library, httpx2 and pydantic, and those only when a name is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import tga_sdk

# With what httpx2 and pydantic need themselves. Whatever else is installed, these programs cannot import it.
_ALLOWED = """
import importlib.abc, sys
allowed = {"tga_sdk", "httpx2", "httpcore2", "h11", "anyio", "idna", "truststore", "typing_extensions", "certifi",
           "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "sniffio"}
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        # sysconfig loads what was written when this Python was built, under a name of the platform.
        if name.partition(".")[0] not in allowed | sys.stdlib_module_names and not name.startswith("_sysconfigdata_"):
            raise ImportError(f"{name} is neither of the standard library nor a dependency of the SDK")
sys.meta_path.insert(0, Blocked())
"""
_EACH = """
import importlib, pkgutil, tga_sdk
from tga_sdk.errors import ExtraMissing
found = [module.name for module in pkgutil.walk_packages(tga_sdk.__path__, "tga_sdk.", onerror=lambda name: None)]
missing = set()
def needs(name, load):
    try:
        load()
    except ExtraMissing as error:  # what needs an extra says which
        missing.add((name, error.extra))
for name in found:
    if not name.startswith("tga_sdk.adapters."):  # each is for a framework, and imports it
        needs(name, lambda: importlib.import_module(name))
for name in dir(tga_sdk):
    needs(name, lambda: getattr(tga_sdk, name))
print(len(found), sorted(missing))
"""
# Agents are those of pydantic-ai.
_NEED_EXTRAS = [
    *("AgentSession", "AgentSpecification", "DurableAgent", "durable"),
    *("tga_sdk.agents", "tga_sdk.testing.models"),
]


def run(program: str) -> str:
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_every_module_and_name_needs_the_standard_library_httpx2_and_pydantic_alone() -> None:
    found, _, missing = run(_ALLOWED + _EACH).partition(" ")
    assert int(found) >= 3
    agents = [(name, "pydantic-ai") for name in _NEED_EXTRAS]
    assert ast.literal_eval(missing) == sorted([*agents, ("tga_sdk.spans", "otel")])


def test_what_is_not_a_dependency_is_found() -> None:
    program = _ALLOWED + "\ntry:\n    import yarl\nexcept ImportError as error:\n    print(error)"
    assert run(program) == "yarl is neither of the standard library nor a dependency of the SDK"


def test_the_bare_import_loads_nothing() -> None:
    assert run("import sys, tga_sdk; print(sorted({'httpx2', 'pydantic', 'asyncio'} & set(sys.modules)))") == "[]"


def test_type_checkers_see_the_names_that_are_exported() -> None:
    tree = ast.parse(Path(tga_sdk.__file__).read_text("utf-8"))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    named = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert named == {f"{module}.{name}" for name, module in tga_sdk._MODULE_OF.items()}
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # or it is no re-export


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tga_sdk, "Nonsense")
