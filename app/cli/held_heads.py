"""Heads that were kept outside the database: by clients, in files; by the signer, beside its key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.cli.verify_bundle import load_keys, read_held
from app.core.errors import SettingInvalid
from app.core.note import VerifierKey
from app.domain.log.forensics import HeldHead
from app.domain.log.heads import SignedHead
from app.keys.log_signer import LOG_VARIABLE, LogSigner
from app.settings import Settings


def load_held(
    settings: Settings, files: Sequence[Path], key: str | None, environment: Mapping[str, str] | None = None
) -> tuple[list[VerifierKey], list[HeldHead]]:
    """The keys that verify heads, and the heads that were kept: those in files must be signed by one of the keys.

    Without `key` the log's own key on this machine is taken, if there is one; it is never made here.
    """
    keys = [] if key is None else load_keys(key)
    own = _remembered(settings, os.environ if environment is None else environment)
    if not keys and own is not None:
        keys = [own[0].verifier_key]
    if files and not keys:
        raise SettingInvalid("there is no key to verify the heads with", expected="--key PUB")
    held = [HeldHead(read_held(path, keys), path.name) for path in files]
    if own is not None and own[1] is not None:
        held.append(HeldHead(own[1], "the signer's memory"))
    return keys, held


def _remembered(settings: Settings, environment: Mapping[str, str]) -> tuple[LogSigner, SignedHead | None] | None:
    if not environment.get(LOG_VARIABLE) and not (settings.keys / "log.key").is_file():
        return None
    signer = LogSigner.open(settings.keys, environment=environment)
    return signer, signer.load_remembered()
