"""What the operator of the gateway allows Lua programs, from `[lua]` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.lua.limits import Limits
from tga_sdk.errors import TgaError
from tga_sdk.models.specs import HttpModel, ModelSpecification, specification

_OF_FILES = ("sklearn", "onnx", "torch", "transformers", "sentence_transformers")


class LuaRefused(TgaError):
    """A program asks for what the operator has not allowed. The message says which setting would allow it."""

    code = "LUA_NOT_ALLOWED"


@dataclass(frozen=True)
class LuaOptions:
    """`agent_models`: which models agents may name, and what they are called for pydantic-ai (`provider:name`); keys of
    providers come from the gateway's own environment. `models`: predictors that the operator specifies, by name: they
    take the place of what a program says. `model_folders`: where model files of programs may stand. `http_hosts`: which
    hosts a model of type http may ask.
    """

    strict_determinism: bool = False
    limits: Limits = field(default_factory=Limits)
    agent_models: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model_folders: tuple[Path, ...] = ()
    http_hosts: frozenset[str] = frozenset()

    def agent_model(self, agent: str, name: str | None, provider: str | None) -> str:
        """What an agent's model is called for pydantic-ai. LuaRefused when the operator does not have it."""
        from tga_sdk.agents.agent import is_provided

        if not name:
            raise LuaRefused(f'agent {agent} has no model: agent "{agent}" {{model = "..."}}')
        full = f"{provider}:{name}" if provider and ":" not in name else name
        for said in (full, name):
            if said in self.agent_models:
                return self.agent_models[said]
            if is_provided(said):
                return said
        has = ", ".join(sorted(self.agent_models)) or "none"
        raise LuaRefused(
            f"agent {agent}: the model {full} is not one that this gateway offers to Lua programs; it offers: {has}. "
            "The operator names models in [lua.agent_models] of tga.toml"
        )

    def predictor(self, name: str, said: Mapping[str, Any]) -> ModelSpecification:
        """The specification of a predictor. LuaRefused where loading it would run code of strangers, read a file that
        the operator has not offered, or ask a host that is not allowed: programs are submitted by strangers."""
        if name in self.models:
            return specification(dict(self.models[name]), name=name)
        spec = specification(dict(said), name=name)
        if isinstance(spec, HttpModel):
            self._verify_host(name, spec)
            return spec
        path = getattr(spec, "path", None)
        if spec.type not in _OF_FILES or path is None:
            raise LuaRefused(
                f"model {name}: expected a model that the operator specifies, found type {spec.type}, which uses the "
                f"gateway's own access. The operator writes it in [lua.models.{name}] of tga.toml"
            )
        return specification({**said, "type": spec.type, "path": str(self._found(name, path, spec))}, name=name)

    def _verify_host(self, name: str, spec: HttpModel) -> None:
        if spec.headers_env:
            raise LuaRefused(
                f"model {name}: headers_env would read the gateway's environment. The operator writes the model in "
                f"[lua.models.{name}] of tga.toml"
            )
        host = urlsplit(spec.endpoint).hostname or ""
        if host not in self.http_hosts:
            has = ", ".join(sorted(self.http_hosts)) or "none"
            raise LuaRefused(
                f"model {name}: the host {host} is not allowed for Lua programs; allowed are: {has}. "
                "The operator names hosts in [lua.http] of tga.toml"
            )

    def _found(self, name: str, path: str, spec: ModelSpecification) -> Path:
        for folder in self.model_folders:
            root = folder.resolve()
            found = (root / path).resolve()
            if found.is_relative_to(root) and found.exists():
                return found
        why = "loading it runs code, and " if spec.runs_code else ""
        has = ", ".join(str(one) for one in self.model_folders) or "none"
        raise LuaRefused(
            f"model {name}: {why}{path} stands in no folder that Lua programs may load models from; these are: {has}. "
            "The operator names folders in [lua] model_folders of tga.toml"
        )
