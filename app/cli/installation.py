"""What stands beside the package `app`, in a clone and in the wheel alike; and how `tga` is started from elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The clone; or the folder `tga_gateway` among the installed packages, in which the wheel has the same layout."""
SCHEMAS: Final = ROOT / "schemas" / "tga" / "v1"
VERIFIER: Final = ROOT / "tools" / "verify.py"


def own_command() -> str:
    """What to type in another terminal, in this folder, to start this `tga`.

    Its bare name where the shell finds the same file under it. Else its path: `uvx`, for one, puts the command's own
    folder on the path of this process only.
    """
    typed = Path(sys.argv[0])
    if typed.suffix == ".py":  # python -m
        return f"{shlex.quote(sys.executable)} -m tga_gateway"
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix not in (sys.base_prefix, os.environ.get("VIRTUAL_ENV")):
        folders = [folder for folder in folders if Path(folder) != Path(sys.prefix) / "bin"]
    found = shutil.which(typed.name, path=os.pathsep.join(folders))
    return shlex.quote(typed.name if found is not None and Path(found).samefile(typed) else sys.argv[0])
