"""The routes of the in-memory gateway: which request is answered how."""

from tga_sdk.testing.routes import calls, procedures, runs, schedules, workers  # each adds its routes to the table
from tga_sdk.testing.routes.routing import Reply, answer

__all__ = ["Reply", "answer", "calls", "procedures", "runs", "schedules", "workers"]
