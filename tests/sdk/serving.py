"""Worker processes of the SDK, as users start them, against the gateways of tests/runs/world.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.runs.world import until


class Served:
    """`tga-worker FILE ...` as a process. What it prints is in `told`, what it logs in `logged`."""

    def __init__(self, folder: Path, url: str, key: str, *words: str, **environment: str) -> None:
        self.folder = folder
        self._told, self._logged = folder / "told", folder / "logged"
        with self._told.open("ab") as told, self._logged.open("ab") as logged:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tga_sdk.worker_cli", *words],
                env={**os.environ, "TGA_URL": url, "TGA_API_KEY": key, "FLOW_NOTES": str(folder), **environment},
                stdout=told,
                stderr=logged,
            )

    @property
    def told(self) -> str:
        return self._told.read_text("utf-8")

    @property
    def logged(self) -> str:
        return self._logged.read_text("utf-8")

    async def until_told(self, text: str) -> None:
        await until(lambda: text in self.told or self.process.poll() is not None)
        assert text in self.told, self.logged

    async def kill(self) -> None:
        """As kill -9 does it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Ask it to end, and see that it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()


def bodies(folder: Path) -> list[dict[str, Any]]:
    """What the bodies of flow_programs.py have noted, in their order."""
    notes = folder / "bodies"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def ran(folder: Path, run_id: str) -> Counter[str]:
    """How often each step of the run was executed."""
    return Counter(one["step"] for one in bodies(folder) if one["run_id"] == run_id)
