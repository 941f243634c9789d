"""Ids that follow from others, so that a repeated request names the same thing: leases, traces and children."""

from __future__ import annotations

import hashlib
from typing import Final

from app.domain.addresses import RUN_KEY_PREFIX

_DAY_MS: Final = 86_400_000


def owner_of(lease: str, incarnation: str) -> str:
    """The owner that a lease makes its worker. The lease is a secret between the two; this stands in the head and in
    every entry made under it, and nobody who reads the log learns the lease from it.

    `incarnation`: of the database that the lease is recorded in. One that was restored from a backup may lack what the
    worker has seen recorded: there the same lease makes another owner, so the worker is told to stop."""
    return _uuid7(hashlib.sha256(f"lease\0{incarnation}\0{lease}".encode()).digest())


def trace_id_of(run_id: str, path: str, try_number: int, *, started_at: str) -> str:
    """The trace of a tool call inside a run: the same for everybody who repeats the operation."""
    digest = hashlib.sha256(f"trace\0{run_id}\0{path}\0{try_number}".encode()).digest()
    return _uuid7(milliseconds_of(started_at).to_bytes(6, "big") + digest[6:])


def child_id_of(run_id: str, path: str, try_number: int, *, tenant_prefix: str) -> str:
    """The run of a child that its program did not name itself."""
    digest = hashlib.sha256(f"child\0{run_id}\0{path}\0{try_number}".encode()).hexdigest()
    return f"{tenant_prefix}child-{digest[:32]}"


def key_of(run_id: str, path: str, try_number: int) -> str:
    """The idempotency key of a tool call inside a run. A try after the first is a new intent, and has a new key."""
    return f"{RUN_KEY_PREFIX}{run_id}/{path}" + (f"/r{try_number - 1}" if try_number > 1 else "")


def milliseconds_of(written: str) -> int:
    """A time as documents write it, in milliseconds since 1970."""
    year, month, day = int(written[0:4]), int(written[5:7]), int(written[8:10])
    hour, minute, second = int(written[11:13]), int(written[14:16]), int(written[17:19])
    # Days of the proleptic Gregorian calendar, in years that begin in March, so that the leap day is the last.
    year -= month < 3
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day - 719_469
    return ((days * 24 + hour) * 60 + minute) * 60_000 + second * 1_000 + int(written[20:23])


def written(milliseconds: int) -> str:
    """The reverse of `milliseconds_of`."""
    days, of_day = divmod(milliseconds, _DAY_MS)
    era, of_era = divmod(days + 719_468, 146_097)
    year_of_era = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * of_year + 2) // 153
    day, year = of_year - (153 * month + 2) // 5 + 1, era * 400 + year_of_era
    month = month + 3 if month < 10 else month - 9
    hour, rest = divmod(of_day, 3_600_000)
    minute, rest = divmod(rest, 60_000)
    second, millisecond = divmod(rest, 1_000)
    date = f"{year + (month < 3):04}-{month:02}-{day:02}"
    return f"{date}T{hour:02}:{minute:02}:{second:02}.{millisecond:03}Z"


def later(time: str, milliseconds: int) -> str:
    """So many milliseconds after a time, as documents write it."""
    return written(milliseconds_of(time) + milliseconds)


def elapsed_ms(since: str, until: str) -> int:
    return milliseconds_of(until) - milliseconds_of(since)


def _uuid7(digest: bytes) -> str:
    """Sixteen bytes in the form of a UUIDv7."""
    made = bytearray(digest[:16])
    made[6] = 0x70 | made[6] & 0x0F
    made[8] = 0x80 | made[8] & 0x3F
    text = made.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
