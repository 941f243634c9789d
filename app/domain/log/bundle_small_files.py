"""The files of a bundle, and those of them that are read whole: schemas and keys, compared with the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from app.core.errors import BundleInvalid, TgaError
from app.core.limits import BUNDLE_MANIFEST_BYTES_MAX
from app.domain.log.bundle import ENTRIES, HEADS, SCHEMAS, FileFacts, Manifest
from app.domain.log.bundled_blobs import BlobFiles


class BundleFiles(BlobFiles, Protocol):
    """The files of a bundle, by the names of its manifest. BundleInvalid where one is missing or no file."""

    def read(self, name: str, *, bytes_max: int) -> bytes: ...

    def lines(self, name: str) -> Iterator[bytes]:
        """Each with its newline, if it has one; none longer than a line may be by more than one byte."""
        ...


def verify_small_files(files: BundleFiles, manifest: Manifest, schemas: Mapping[str, bytes]) -> Iterator[TgaError]:
    """Nothing rests on keys.json: it is only compared with what the manifest says of it."""
    missing = {SCHEMAS + name for name in schemas} - manifest.files.keys()
    for name in sorted(missing):
        yield BundleInvalid("the bundle lacks a schema", expected=name)
    for name, facts in sorted(manifest.files.items()):
        if name in (ENTRIES, HEADS):
            continue
        try:
            raw = files.read(name, bytes_max=BUNDLE_MANIFEST_BYTES_MAX)
            found = FileFacts.of(raw)
            if found != facts:
                raise BundleInvalid(f"{name} is not the file that was exported", expected=facts, found=found)
            if name.startswith(SCHEMAS):
                _verify_schema(name, raw, schemas)
        except TgaError as error:
            yield error


def _verify_schema(name: str, raw: bytes, schemas: Mapping[str, bytes]) -> None:
    """Documents are judged by this version's schemas; one of the bundle's that differs is not passed over."""
    own = schemas.get(name.removeprefix(SCHEMAS))
    if own != raw:
        raise BundleInvalid(
            f"{name} is not this version's",
            expected="no such schema" if own is None else hashlib.sha256(own).hexdigest(),
            found=hashlib.sha256(raw).hexdigest(),
            remedy="Verify the bundle with the version that exported it; if that is this one, it was changed.",
        )
