"""The filter of system calls for aarch64 on a kernel of aarch64, in an emulated machine: every number is tried by a
process that has installed the very bytes, and answers as the table says. On x86_64 other tests do this natively.

Needs an emulator, a compiler and a kernel, which are no part of this repository:

    apt-get install qemu-system-arm gcc-aarch64-linux-gnu
    export TGA_AARCH64_KERNEL=.../vmlinuz-...-arm64    # of a package linux-image-cloud-arm64, which dpkg-deb -x unpacks
    TGA_SOAK=1 python -m pytest tests/lua/test_aarch64_filter.py

TGA_AARCH64_QEMU and TGA_AARCH64_CC are commands to use in place of those on the PATH.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from app.lua import seccomp
from tests.conftest import IS_SOAK

HERE = Path(__file__).parent / "aarch64"
NUMBERS = range(470)
SIGSEGV, SIGSYS = 11, 31
_FILE, _FOLDER, _DEVICE = 0o100755, 0o40755, 0o20600


def command(variable: str, name: str) -> list[str]:
    found = os.environ.get(variable) or shutil.which(name)
    if not found:
        pytest.skip(f"NOT TRIED: {name} is not there; say where with {variable}")
    return shlex.split(found)


def archived(name: str, data: bytes, mode: int, device: tuple[int, int] = (0, 0)) -> bytes:
    """One file of an initramfs (cpio, newc)."""
    path = name.encode() + b"\0"
    fields = (1, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % one for one in fields) + path
    whole = head + bytes(-len(head) % 4) + data
    return whole + bytes(-len(whole) % 4)


def initramfs(init: bytes) -> bytes:
    parts = (
        archived("dev", b"", _FOLDER),
        archived("dev/console", b"", _DEVICE, (5, 1)),
        archived("init", init, _FILE),
        archived("TRAILER!!!", b"", 0),
    )
    return gzip.compress(b"".join(parts))


def answers_of_a_kernel(place: Path, program: bytes) -> dict[tuple[str, int], tuple[str, int]]:
    """By name and number of each call that was tried: what came of it, and the status of the process that tried it."""
    kernel = os.environ.get("TGA_AARCH64_KERNEL")
    if not kernel:
        pytest.skip("NOT TRIED: there is no kernel of aarch64; say where with TGA_AARCH64_KERNEL")
    qemu = command("TGA_AARCH64_QEMU", "qemu-system-aarch64")
    compiler = command("TGA_AARCH64_CC", "aarch64-linux-gnu-gcc")
    (place / "filter.h").write_text(",".join(map(str, program)))
    options = ["-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-O1", f"-I{place}"]
    subprocess.run([*compiler, *options, "-o", str(place / "init"), str(HERE / "init.c")], check=True)
    (place / "initrd.gz").write_bytes(initramfs((place / "init").read_bytes()))
    machine = [*qemu, "-M", "virt", "-cpu", "cortex-a57", "-m", "256", "-nographic", "-no-reboot", "-nic", "none"]
    machine += ["-kernel", kernel, "-initrd", str(place / "initrd.gz"), "-append", "console=ttyAMA0 quiet panic=-1"]
    said = subprocess.run(machine, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=600)
    lines = said.stdout.decode(errors="replace").replace("\r", "").split("BEGIN\n")[-1].split("\nEND")[0].split("\n")
    tried = [line.split() for line in lines]
    return {(name, int(number)): (end, int(status)) for name, number, end, status in tried}


@pytest.mark.skipif(not IS_SOAK, reason="in soak: it starts a machine")
def test_a_kernel_answers_each_call_as_the_table_says(tmp_path: Path) -> None:
    calls = seccomp._AARCH64
    found = answers_of_a_kernel(tmp_path, seccomp.build_filter(calls))
    by_number = {number: end for (name, number), end in found.items() if name == "number"}
    looked_at = {calls.read, calls.write, *calls.mapping, calls.plain["exit"], calls.plain["exit_group"]}
    assert set(by_number) == set(NUMBERS) - looked_at
    for number, (end, status) in by_number.items():
        if number == calls.plain["rt_sigreturn"]:
            assert (end, status & 127) == ("KILLED", SIGSEGV), "it came to the kernel, which found no frame"
        else:
            assert end == ("ALLOWED" if number in calls.plain.values() else "REFUSED"), number
    by_name = {name: end for (name, _), (end, _) in found.items() if name != "number"}
    assert by_name == {
        **dict.fromkeys(("exit", "exit_group", "read_0", "write_1", "mmap_rw", "mprotect_r"), "ALLOWED"),
        **dict.fromkeys(("read_1", "read_3", "write_0", "write_2", "mmap_exec", "mprotect_exec"), "REFUSED"),
        "x32": "KILLED",
    }
    assert next(status for (name, _), (_, status) in found.items() if name == "x32") & 127 == SIGSYS
