"""The command `tga` of an installation; also `python -m tga_gateway`.

The gateway's code is the package `app`, and many projects have a package of that name. The wheel therefore keeps ours
inside `tga_gateway`, where it shadows nobody's, and this launcher puts it first on the path of its own process alone.
In a clone `app` stands beside this package instead.
"""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> None:
    """Run the command. It takes the process for itself: in one that has loaded another `app`, it refuses."""
    here = Path(__file__).resolve().parent
    home = here if (here / "app").is_dir() else here.parent
    loaded = sys.modules.get("app")
    if loaded is not None and list(getattr(loaded, "__path__", ())) != [str(home / "app")]:
        sys.exit(
            f"error: this process has loaded another package `app` ({loaded}). Start `tga` as a process of its own."
        )
    sys.path.insert(0, str(home))
    from app.main import run as run_command

    run_command()


if __name__ == "__main__":
    run()
