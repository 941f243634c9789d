"""How an attempt ends: what the gateway is told, and what the journal says of the error that ended it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

from tga_sdk.errors import OperationError, Stop, TgaError
from tga_sdk.pipe import Put

MESSAGE_CHARS_MAX: Final = 1_024
TYPE_CHARS_MAX: Final = 128
_UNPRINTABLE: Final = re.compile("[^!-~]")
_SDK: Final = str(Path(__file__).parent)
_LIBRARIES: Final = sysconfig.get_path("stdlib")


class Over(Stop):
    """The attempt is over, whatever the program catches. `then` is what the gateway is told; None: nothing."""

    def __init__(self, how: str, then: Put | None = None) -> None:
        super().__init__(how)
        self.how = how
        self.then = then


def failure(code: str, message: str) -> Put:
    """What the gateway is told where the run fails for another reason than an error of its program."""
    return {"type": "fail", "error": {"type": code, "message": message[:MESSAGE_CHARS_MAX], "retryable": False}}


def error_document(error: BaseException) -> dict[str, Any]:
    """What the journal says of an error."""
    if isinstance(error, OperationError):
        said = error.document()
    else:
        code = error.code if isinstance(error, TgaError) else type(error).__name__
        said = {"type": code, "message": str(error) or type(error).__name__, "retryable": False}
    # A class may be called as it likes, and a Lua program may say any type; the journal has names that can be printed.
    said["type"] = _UNPRINTABLE.sub("_", said["type"])[:TYPE_CHARS_MAX] or "Error"
    said["message"] = said["message"][:MESSAGE_CHARS_MAX]
    return said


def program_line(error: BaseException) -> str | None:
    """The line of the program at which this was raised: the innermost one outside of the SDK and the libraries."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_SDK, _LIBRARIES)) and not file.startswith("<") and "site-packages" not in file:
            found = f"{file}:{line}"
    return found
