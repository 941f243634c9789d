"""Every bound in one place, with its unit in its name. A document beyond one is refused before it is parsed."""

from __future__ import annotations

from typing import Final

# Input. Depth stays far below CPython's recursion limit, so that no parser underneath is ever the one to notice.
DOCUMENT_BYTES_MAX: Final = 262_144
DEPTH_MAX: Final = 64
KEYS_MAX: Final = 10_000
NUMBER_CHARS_MAX: Final = 64
SAFE_INTEGER_MAX: Final = 2**53 - 1

# Ledger. 65,535 is what a C2SP entry bundle can carry, so that every entry can become a leaf of a tile.
ENTRY_BYTES_MAX: Final = 65_535
ARTIFACT_BYTES_MAX: Final = 524_288
STREAM_ID_CHARS_MAX: Final = 255
PLAN_ENTRIES_MAX: Final = 16
BATCH_PLANS_MAX: Final = 64
BATCH_BYTES_MAX: Final = 1_048_576

# Names that callers choose and that become keys of an index.
NAME_CHARS_MAX: Final = 128
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
TEXT_CHARS_MAX: Final = 4_096

LIST_ENTRIES_MAX: Final = 1_000
CHECKPOINT_EVERY_ENTRIES: Final = 100
LOCK_TIMEOUT_MS: Final = 5_000
