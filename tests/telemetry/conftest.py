"""One PostgreSQL, one bank and one parent of processes, as for runs."""

from tests.runs.conftest import started_world, world

__all__ = ["started_world", "world"]
