"""Heads that were kept elsewhere, compared with the log as this gateway has it: signatures verified and consistency
proofs recomputed here, from what the API sends.

A kept head that fits shows that nothing before it was changed since it was kept. One that does not fit shows that the
histories split at or before its size; with several kept heads the place is known as closely as they stand together.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from typing import Final, Literal

from app.console.gateway_api import ApiProblem, SessionApi
from app.core.errors import NoteInvalid, TgaError
from app.core.merkle import Hash, verify_consistency
from app.core.note import TreeHead, VerifierKey, open_note
from app.domain.log.epochs import keys_for
from app.domain.log.heads import fits

KEPT_MAX: Final = 20
_SIGNED_BY: Final = "\u2014 "


@dataclass(frozen=True, slots=True)
class Compared:
    """One kept head. `invalid`: it is none, or the log's key did not sign it. `beyond`: the log is shorter than it."""

    standing: Literal["fits", "split", "beyond", "invalid"]
    what: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`fits_up_to`: the largest kept head that fits. `splits_by`: the smallest that does not."""

    heads: list[Compared]
    newest: TreeHead | None
    fits_up_to: int | None
    splits_by: int | None


def notes_in(text: str) -> list[str]:
    """The notes that were pasted, one behind the other; blank lines between them do not matter."""
    notes, lines, is_signed = list[str](), list[str](), False
    for line in text.replace("\r\n", "\n").split("\n"):
        if is_signed and not line.startswith(_SIGNED_BY):
            notes.append("\n".join(lines) + "\n")
            lines, is_signed = [], False
        if not lines and not line.strip():
            continue
        is_signed = line.startswith(_SIGNED_BY)
        lines.append(line)
    return [*notes, *(["\n".join(lines) + "\n"] if lines else [])]


async def compare_kept(api: SessionApi, text: str) -> Comparison:
    """ApiProblem when the log has no head or key to compare with."""
    key = VerifierKey.from_text((await api.text("/v1/log/key")).strip())
    newest = _opened(await api.text("/v1/log/checkpoint"), key)
    notes = notes_in(text)
    heads = [await _compared(api, note, key, newest) for note in notes[:KEPT_MAX]]
    if len(notes) > KEPT_MAX:
        heads.append(Compared("invalid", f"{len(notes) - KEPT_MAX} more were not looked at: {KEPT_MAX} at a time."))
    fitting = [one.size for one in heads if one.standing == "fits" and one.size is not None]
    split = [one.size for one in heads if one.standing in ("split", "beyond") and one.size is not None]
    return Comparison(heads, newest, max(fitting, default=None), min(split, default=None))


def _opened(note: str, key: VerifierKey) -> TreeHead:
    origin = note.partition("\n")[0]
    return TreeHead.from_text(open_note(note, [key, *keys_for(origin, [key])], fits))


async def _compared(api: SessionApi, note: str, key: VerifierKey, newest: TreeHead) -> Compared:
    try:
        kept = _opened(note, key)
    except NoteInvalid as error:
        return Compared("invalid", f"This is no head that the log's key signed: {error.what}.")
    if kept.origin != newest.origin:
        return Compared("invalid", f"It is of {kept.origin}, and the log is now {newest.origin}.", kept.size)
    if kept.size > newest.size:
        return Compared(
            "beyond",
            f"It covers {kept.size:,} entries, and the log's newest head only {newest.size:,}: entries were cut off, "
            "or an old backup was restored.",
            kept.size,
        )
    if kept.size in (0, newest.size):
        if kept.size == 0 or kept.root == newest.root:
            return Compared("fits", f"The log at {kept.size:,} has the same root.", kept.size)
        return _split(kept)
    try:
        proof = await api.get("/v1/log/proof/consistency", old=kept.size, new=newest.size)
        hashes = [Hash(b64decode(one, validate=True)) for one in proof["hashes"]]
        verify_consistency(old=kept.size, new=newest.size, old_root=kept.root, new_root=newest.root, proof=hashes)
    except (TgaError, ValueError):
        return _split(kept)
    except ApiProblem as problem:
        return Compared(
            "split", f"The gateway could not prove it: {problem.code}. Verify everything, and look there.", kept.size
        )
    return Compared(
        "fits",
        f"The log of {newest.size:,} begins with the {kept.size:,} entries that it covers, by a proof of "
        f"{len(hashes)} hashes that was recomputed here.",
        kept.size,
    )


def _split(kept: TreeHead) -> Compared:
    return Compared(
        "split",
        f"The log's first {kept.size:,} entries are not those that it covers: at or before entry {kept.size:,} the "
        "history was rewritten.",
        kept.size,
    )
