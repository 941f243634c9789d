"""The built wheel works outside the clone, with schemas and migrations inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from app.postgres.migrate import packaged_migrations
from tests.conftest import Server

ROOT = Path(__file__).parents[2]


async def test_the_wheel_works_outside_the_clone(server: Server, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {file.name for file in (installed / "app/schemas/tga/v1").iterdir()} == {
        file.name for file in (ROOT / "schemas/tga/v1").iterdir()
    }
    assert not (installed / "tests").exists()
    name = f"tga_wheel_{os.getpid()}"
    await server.execute_as_root(f"CREATE DATABASE {name}")
    try:
        environment = {"PYTHONPATH": str(installed), "TGA_DATABASE_URL": server.url("postgres", name), "PATH": ""}
        where = subprocess.run(
            [sys.executable, "-c", "import app; print(app.__file__)"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert where.stdout.startswith(str(installed))
        told = subprocess.run(
            [sys.executable, "-m", "app.main", "db", "migrate"],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert told.stdout.count("applied") == len(packaged_migrations())
    finally:
        await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")
