from __future__ import annotations

from pathlib import Path

import pytest

from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.export.world import World


@pytest.fixture
def world(database: Database, sessions: Sessions, store: PostgresStateStore, tmp_path: Path) -> World:
    return World(database, sessions, store, tmp_path / "keys")


@pytest.fixture
def signer(tmp_path: Path) -> LogSigner:
    return LogSigner.open(tmp_path / "keys", environment={})
