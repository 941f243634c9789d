"""Ids of runs, and addresses of operations in them: what a trace says of the run that made its call."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from app.core.limits import RUN_ENTRIES_MAX, RUN_PATH_CHARS_MAX
from app.domain.ledger.documents import Name, Part

_NUMBER: Final = "[1-9][0-9]{0,6}"
# Keys of tool calls that runs make: `run:{run_id}/{path}`, with `/r{n}` at a later try.
RUN_KEY_PREFIX: Final = "run:"
PATH_PATTERN: Final = rf"^{_NUMBER}((:{_NUMBER})?\.{_NUMBER})*$"
# What a tenant calls its run. The log's id of a run outside the default tenant begins with the tenant and a /.
OWN_RUN_ID_PATTERN: Final = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,95}$"

RunId = Annotated[
    str,
    StringConstraints(min_length=1, max_length=225, pattern=r"^([!-.0-~]{1,128}/)?[A-Za-z0-9][A-Za-z0-9._:-]{0,95}$"),
]
Path = Annotated[str, StringConstraints(min_length=1, max_length=RUN_PATH_CHARS_MAX, pattern=PATH_PATTERN)]


class RunOfCall(Part):
    """The operation of a run that made a tool call. `procedure` and `version` stand here for the policy, which judges
    a waiting call again before it is approved."""

    run_id: RunId
    procedure: Name
    version: Name
    path: Path
    attempt: Annotated[int, Field(ge=1, le=RUN_ENTRIES_MAX)]
    worker: Name
