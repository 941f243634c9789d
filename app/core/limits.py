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
BATCH_PLANS_MAX: Final = 64
BATCH_BYTES_MAX: Final = 1_048_576
WRITER_FLUSHERS_MAX: Final = 2
WRITER_SECOND_FLUSHER_FROM_PLANS: Final = 16
WRITER_QUEUE_PLANS_MAX: Final = 10_000
WRITER_QUEUE_BYTES_MAX: Final = 67_108_864

# Names that callers choose and that become keys of an index.
NAME_CHARS_MAX: Final = 128
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
TEXT_CHARS_MAX: Final = 4_096

ATTEMPTS_LISTED_MAX: Final = 100
LIST_ENTRIES_MAX: Final = 1_000
LOCK_TIMEOUT_MS: Final = 5_000

# The runtime. Waiting between attempts grows from the first to the last of these, with jitter.
BACKOFF_FIRST_MS: Final = 100
BACKOFF_MAX_MS: Final = 10_000
FOLLOW_POLL_MS: Final = 50
FOLLOW_POLL_MAX_MS: Final = 1_000
UNSETTLED_WAIT_MS: Final = 10_000
RECOVERIES_AT_ONCE_MAX: Final = 32
RECOVERY_PAGE_TRACES: Final = 500

# Tool servers: what a configuration may ask for, and what is read of an answer.
CALL_TIMEOUT_MS_MAX: Final = 600_000
CALL_ATTEMPTS_MAX: Final = ATTEMPTS_LISTED_MAX
CONFIG_BYTES_MAX: Final = 1_048_576
INPUT_SCHEMA_BYTES_MAX: Final = 65_536
TOOL_TAGS_MAX: Final = 16
RESPONSE_BYTES_READ_MAX: Final = 16_777_216
RESPONSE_HEADER_BYTES_MAX: Final = 65_536
RETRY_AFTER_MS_MAX: Final = 300_000
CONNECTIONS_PER_SERVER_MAX: Final = 64
# An output must still fit when it is wrapped: in its effect with all attempts, and in documents that quote it.
OUTPUT_KEYS_RESERVED: Final = 1_000
OUTPUT_DEPTH_RESERVED: Final = 8
SHOWN_CHARS_MAX: Final = 64
CLOSE_WAIT_MS: Final = 30_000
SWEEP_EVERY_MS: Final = 3_000
