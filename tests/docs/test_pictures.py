"""README's pictures: each is there in both colour schemes and small, and the script that takes them still does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.console.browsing import NARROW, open_desk
from tests.console.pictures import EVERY_PAGE, SCENES, SHOWN, THEMES, draw

pytestmark = pytest.mark.one_in(3, of="file")

ROOT = Path(__file__).parents[2]
BYTES_MAX = 200_000
PNG = b"\x89PNG\r\n\x1a\n"


def test_every_picture_that_readme_names_is_there_and_small_and_no_other_is_kept() -> None:
    told = (ROOT / "README.md").read_text() + (ROOT / "docs" / "console.md").read_text()
    named = set(re.findall(r"pictures/([\w-]+\.png)", told))
    assert named == {f"{scene}-{theme}.png" for scene in SCENES for theme in THEMES}
    kept = {path.name: path.read_bytes() for path in SHOWN.iterdir()}
    assert set(kept) == named
    for name, raw in kept.items():
        assert raw.startswith(PNG), name
        assert len(raw) < BYTES_MAX, name


def test_the_script_takes_pictures_of_a_real_gateway(tmp_path: Path) -> None:
    with open_desk() as desk:
        scenes = {name: EVERY_PAGE[name] for name in ("overview", "ledger")}
        made = draw(desk, {}, tmp_path, scenes, size=NARROW, tag="-narrow")
        assert [path.name for path in made] == [f"{name}-narrow-{theme}.png" for theme in THEMES for name in scenes]
        assert all(path.read_bytes().startswith(PNG) for path in made)
        light, dark = made[0].read_bytes(), made[2].read_bytes()
        assert light != dark
        desk.verify_quiet()
