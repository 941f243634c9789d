"""A test that never ends, for tests/test_leftovers.py to end. Its name keeps it out of the suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from app.postgres.embedded.postmaster import recorded_pid
from tests.conftest import Servers


@pytest.mark.parametrize("name", ["embedded", "system"])
def test_that_stands_still(servers: Servers, name: str) -> None:
    server = servers.named(name)
    assert server.embedded is not None
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    found = {
        "folder": tempfile.gettempdir(),
        "postmaster": recorded_pid(server.embedded.data_dir / "postmaster.pid"),
        "other": other.pid,
        "self": os.getpid(),
    }
    told = Path(os.environ["TGA_TELL"])
    told.with_suffix(".new").write_text(json.dumps(found))
    told.with_suffix(".new").rename(told)
    signal.pause()
