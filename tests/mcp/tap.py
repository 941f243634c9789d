"""Stands between the gateway and a stdio server that nobody here wrote, and counts what is sent to it.

    tap.py BOOK COMMAND...

Every line that asks for a tool is appended to BOOK as it passes. While the file BOOK.hold exists, answers are kept
back: the server has done its work, and the gateway does not know.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import IO


def pass_on(source: IO[bytes], held_by: str) -> None:
    for line in source:
        while os.path.exists(held_by):
            time.sleep(0.01)
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    os._exit(1)


def main(book: str, command: list[str]) -> None:
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    threading.Thread(target=pass_on, args=(server.stdout, f"{book}.hold"), daemon=True).start()
    for line in sys.stdin.buffer:
        if b'"tools/call"' in line:
            with open(book, "ab") as file:
                file.write(line)
        server.stdin.write(line)
        server.stdin.flush()
    server.stdin.close()
    server.wait(timeout=120)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
