"""What `tga doctor` says of Lua: whether submitted programs are executed here, and how their processes are confined."""

from __future__ import annotations

from app.cli.findings import Finding
from app.config import Config
from app.core.errors import TgaError


async def lua_finding(config: Config) -> Finding:
    """Starts one of the processes that programs run in, and ends it again."""
    if not config.lua.enabled:
        return Finding("lua", True, "off: [lua] enabled is false, and submitted programs are refused")
    try:
        from app.gateway.lua import options_of
        from app.lua.pool import ChildLost, Pool
    except ImportError as error:
        return Finding("lua", False, f"a part is not installed: {error.name}", "Install the gateway again.")
    try:
        async with Pool(options_of(config).limits, 1) as pool:
            report = await pool.report()
    except (ChildLost, TgaError, OSError) as error:
        remedy = "Programs in Lua cannot run here: look at the gateway's log, or set enabled = false in [lua]."
        return Finding("lua", False, f"a process for programs could not be started: {error}", remedy)
    confined = ", ".join(report["confinement"]) or "nothing but its limits"
    found = f"{config.lua.children} processes for programs, each confined by {confined}"
    if "seccomp" in report["confinement"]:
        return Finding("lua", True, found)
    remedy = "This system has no seccomp for it: run the gateway in a container or under a user of its own."
    return Finding("lua", True, found, remedy, warning=True)
