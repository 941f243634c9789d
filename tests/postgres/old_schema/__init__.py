"""The migrations of before the schema was made anew, as they were: the append function of today is compared with
theirs, and a store that they made is refused."""

from __future__ import annotations

import re
from pathlib import Path

from app.postgres.migrate import Migration


def old_migrations() -> tuple[Migration, ...]:
    found = []
    for file in sorted(Path(__file__).parent.glob("0*.sql")):
        match = re.fullmatch(r"([0-9]{4})_([a-z_]+)\.sql", file.name)
        assert match is not None
        found.append(Migration(int(match[1]), match[2], file.read_text("utf-8")))
    return tuple(found)
