from __future__ import annotations

from pathlib import Path

import pytest

from app.keys.keyring import Keyring
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import Sessions


@pytest.fixture
def keyring(home: Path) -> Keyring:
    return Keyring.open(home / "keys", {})


@pytest.fixture
def outbox(sessions: Sessions) -> PostgresOutbox:
    return PostgresOutbox(sessions)
