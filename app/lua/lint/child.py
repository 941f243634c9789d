"""The text of a stranger's program is parsed in a process of its own, which can be lost: the parser is written in C.

Reads the program from its standard input, writes the findings as JSON. Its time and memory are bounded by the kernel.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any, Final

from app.core.limits import LUA_LINT_BYTES, LUA_LINT_CPU_S

HERE: Final = Path(__file__).resolve().parent
_WAIT_S: Final = 120.0  # a slow machine is no fault of the program
logger = logging.getLogger("tga")


async def findings_in(text: str, name: str) -> list[dict[str, Any]]:
    """What `tga lint` finds in the text; nothing where it cannot be judged: Lua itself has the last word on it."""
    home = str(HERE.parent.parent.parent)
    program = f"import sys; sys.path.insert(0, {home!r}); from app.lua.lint.child import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", program, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"LC_ALL": "C"},
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_WAIT_S):
            said, _ = await process.communicate(text.encode())
    except TimeoutError:
        said = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        logger.warning("the program %s could not be judged: its parser ended with %s", name, process.returncode)
        return []
    found: list[dict[str, Any]] = json.loads(said)
    return found


def main() -> None:
    from app.lua.lint import LintError, lint_source

    lint_source(b"return 1")  # what is loaded by need is loaded before the bounds hold
    resource.setrlimit(resource.RLIMIT_CPU, (LUA_LINT_CPU_S, LUA_LINT_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (LUA_LINT_BYTES, LUA_LINT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        report = lint_source(sys.stdin.buffer.read(), sys.argv[-1])
    except LintError:
        found = []
    else:
        found = [finding.document() for finding in report.findings]
    sys.stdout.write(json.dumps(found))
