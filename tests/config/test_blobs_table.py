"""`[blobs]` of tga.toml: which places can be named, and how large a blob may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from app.core.errors import SettingInvalid
from app.core.limits import BLOB_BYTES_DEFAULT, BLOB_BYTES_MAX


def load(folder: Path, table: str) -> tuple[str | None, int]:
    (folder / "tga.toml").write_text(f"[blobs]\n{table}\n")
    blobs = load_config(folder / "tga.toml").blobs
    return blobs.url, blobs.max_bytes


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/tga", "az://container/tga", "file:///srv/tga-blobs"]
)
def test_a_place_that_can_be_named(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, f'url = "{url}"') == (url, BLOB_BYTES_DEFAULT)


@pytest.mark.parametrize(
    "url",
    [
        *("", "bucket", "s3://", "s3:///key", "file://host/path", "file:///", "http://host/bucket", "ftp://host/x"),
        *("s3://key:secret@bucket", "s3://bucket?region=x", "s3://bucket#x", "s3://bucket/a b", "s3://bucket/../other"),
    ],
)
def test_another_place_is_refused_and_its_url_not_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingInvalid, match=r"blobs\.url") as refused:
        load(tmp_path, f'url = "{url}"')
    assert "s3://bucket[/prefix]" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_largest_blob_is_bounded(tmp_path: Path) -> None:
    assert load(tmp_path, "max_bytes = 1") == (None, 1)
    for wrong in (0, -1, BLOB_BYTES_MAX + 1, "true", '"10"', "1.5"):
        with pytest.raises(SettingInvalid, match=r"blobs\.max_bytes"):
            load(tmp_path, f"max_bytes = {wrong}")
