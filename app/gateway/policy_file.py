"""The policy in a file, as the gateway's supervisor: read at the start, and read again while the gateway runs."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Self

from app.connectors.registry import Registry
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import PolicyInvalid, SettingInvalid, TgaError
from app.core.limits import POLICY_BYTES_MAX
from app.domain.identity import Principal
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.question import AskedStart, AskedSubmission, Verdict
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool

PACKAGED_NAME: Final = "the packaged policy"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a look at the file found, told once. `error` is None: the policy with `digest` is in force now; otherwise
    the file cannot be used, and the policy with `digest` stays in force."""

    digest: Digest
    error: TgaError | None
    warnings: tuple[str, ...] = ()


def packaged_policy_text() -> str:
    return resources.files("app.demo").joinpath("policy.cedar").read_text("utf-8")


def load_policy(path: Path | None) -> CedarPolicy:
    """The policy in `path`; None: the packaged one. Raises SettingInvalid if it cannot be read, else PolicyInvalid."""
    if path is None:
        return CedarPolicy(packaged_policy_text(), name=PACKAGED_NAME)
    return _parsed(_read(path), path)


def _read(path: Path) -> bytes:
    try:
        # A pipe would keep the reader waiting for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingInvalid(f"{path} is not a file", remedy="Name the policy file.")
        with path.open("rb") as file:
            raw = file.read(POLICY_BYTES_MAX + 1)
    except OSError as error:
        raise SettingInvalid(f"{path} cannot be read", found=error.strerror) from None
    if len(raw) > POLICY_BYTES_MAX:
        raise PolicyInvalid(f"{path} is too large", expected=f"at most {POLICY_BYTES_MAX} bytes")
    return raw


def _parsed(raw: bytes, path: Path) -> CedarPolicy:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise PolicyInvalid(f"{path}, line {line}: not UTF-8") from None
    return CedarPolicy(text, name=str(path))


class PolicyFile:
    """A Supervisor whose policy follows its file. Whatever happens to the file, a policy that was valid is in force."""

    def __init__(self, policy: CedarPolicy, path: Path | None) -> None:
        self._policy = policy
        self._path = path
        self._unsettled: Digest | None = None
        self._refused: Digest | str | None = None
        self._last_error: TgaError | None = None

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """The file's policy, or the packaged one, which never changes. Raises as `load_policy`."""
        return cls(load_policy(path), path)

    @property
    def policy(self) -> CedarPolicy:
        return self._policy

    @property
    def text(self) -> str:
        return self._policy.text

    @property
    def digest(self) -> Digest:
        return self._policy.digest

    @property
    def last_error(self) -> TgaError | None:
        """Why the file as it is now is not in force; None while it is."""
        return self._last_error

    async def judge(self, request: ActionRequest, tool: Tool) -> Verdict:
        return self._policy.judge(request, tool)

    async def judge_approval(self, request: ActionRequest, tool: Tool, approver: Principal) -> Verdict:
        return self._policy.judge_approval(request, tool, approver)

    async def judge_start(self, asked: AskedStart) -> Verdict:
        return self._policy.judge_start(asked)

    async def judge_submission(self, asked: AskedSubmission) -> Verdict:
        return self._policy.judge_submission(asked)

    async def refresh(self) -> Reloaded | None:
        """Look at the file; what is new is told once. Never raises for what the file is or holds.

        A change is taken when two looks in a row find the same bytes. A file that is being written is cut somewhere,
        and what is cut after a `permit` and before its `forbid` is valid Cedar. The bytes are compared, not times:
        a file is small, and an edit within one tick of its clock leaves the same times.
        """
        if self._path is None:
            return None
        try:
            raw = await asyncio.to_thread(_read, self._path)
        except TgaError as error:
            self._unsettled = None
            return self._refuse(str(error), error)
        found = digest_of_bytes(raw)
        if found == self._policy.digest:
            self._unsettled = None
            return self._accept(self._policy) if self._last_error is not None else None
        if found == self._refused:
            return None
        if found != self._unsettled:
            self._unsettled = found
            return None
        try:
            policy = await asyncio.to_thread(_parsed, raw, self._path)
        except TgaError as error:
            return self._refuse(found, error)
        return self._accept(policy)

    def _accept(self, policy: CedarPolicy) -> Reloaded:
        self._policy, self._refused, self._last_error = policy, None, None
        return Reloaded(policy.digest, None, tuple(policy.warnings))

    def _refuse(self, what: Digest | str, error: TgaError) -> Reloaded | None:
        if what == self._refused:
            return None
        self._refused, self._last_error = what, error
        return Reloaded(self._policy.digest, error)


def live_misfits(policy: CedarPolicy, registry: Registry) -> list[str]:
    """The rules that can never match, as far as the registry knows its tools by now."""
    away = {s.server_id for s in registry.servers() if s.connection is not None and s.connection.state != "connected"}
    return policy.misfits(registry.tools(), undiscovered=away)
