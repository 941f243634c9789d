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
WRITER_SESSIONS_MAX: Final = 3
WRITER_WAIT_MS: Final = 3  # behind a commit that is under way, before another session takes what waits
WRITER_QUEUE_PLANS_MAX: Final = 10_000
WRITER_QUEUE_BYTES_MAX: Final = 67_108_864

# What others write (arguments, outputs, definitions of tools, the policy's text) comes to stand inside documents, and
# those inside others. The documents around it take at most the first three; what is left is its own limit, so that
# whatever passes it can be recorded, sent and shown. A test makes the largest of each and writes all around it.
ENCLOSING_DEPTH: Final = 8
ENCLOSING_KEYS: Final = 1_000
ENCLOSING_BYTES: Final = 65_536
ENCLOSED_DEPTH_MAX: Final = DEPTH_MAX - ENCLOSING_DEPTH
ENCLOSED_KEYS_MAX: Final = KEYS_MAX - ENCLOSING_KEYS
ENCLOSED_BYTES_MAX: Final = ARTIFACT_BYTES_MAX - ENCLOSING_BYTES

# Names that callers choose and that become keys of an index.
NAME_CHARS_MAX: Final = 128
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
TEXT_CHARS_MAX: Final = 4_096

ATTEMPTS_LISTED_MAX: Final = 100
ATTEMPTS_MAX: Final = 1_000  # of one call, those that operators ordered among them
LIST_ENTRIES_MAX: Final = 1_000
# A process remembers which keys to look for before it appends, and the last finished traces that it verified.
REPEAT_KEYS_EXPECTED_MAX: Final = 32_768
REPEATS_VERIFIED_MAX: Final = 1_024
REPEATS_VERIFIED_BYTES_MAX: Final = 8_388_608
# Looks for recorded calls: how many must ask for the first statement, the second; and how many share one at the most.
CALL_LOOKUPS_FROM_ASKED: Final = (1, 16)
CALL_LOOKUPS_GROUPED_MAX: Final = 16
WINNER_BYTES_MAX: Final = 65_536  # of a recorded call that comes with the refusal of its repeat; a batch has many
LOCK_TIMEOUT_MS: Final = 5_000
READ_LOCK_TIMEOUT_MS: Final = 2_000  # a read waits for a lock only if someone changes or locks the table itself
# A batch that did not get its locks is committed plan by plan, and each plan has waited already. When so many of them
# do not get theirs either, it is no stream's lock but a table's, and the rest is refused untried.
SINGLE_LOCK_TIMEOUT_MS: Final = 100
SINGLE_LOCK_FAILURES_MAX: Final = 5

# Ownership. A call is sent if the proof of ownership before it was asked for at most the first of these ago. An
# executor asks for one of its own accord every so often, and sends nothing while an answer is overdue: together the two
# stay below the 11 s after which PostgreSQL gives up a silent session (`tcp_keepalives_*`), and others may take over.
OWNERSHIP_BELIEVED_MS: Final = 250
OWNER_BEAT_MS: Final = 2_000
OWNER_OVERDUE_MS: Final = 4_000

# The runtime. Waiting between attempts grows from the first to the last of these, with jitter.
BACKOFF_FIRST_MS: Final = 100
BACKOFF_MAX_MS: Final = 10_000
RECONNECT_MAX_MS: Final = 1_000  # of the few sessions that everything waits for: a try costs next to nothing
FOLLOW_POLL_MS: Final = 50
FOLLOW_POLL_MAX_MS: Final = 1_000
LOOK_AGAIN_S: Final = 1  # what the caller of an unfinished trace is told in Retry-After
LOOK_AGAIN_WAITING_S: Final = 5  # of one that waits for a person
UNSETTLED_WAIT_MS: Final = 10_000
STORE_ANSWER_MS: Final = 2_000  # beyond a caller's `wait_ms`: for the store to make durable, or to show, what is told
RECOVERIES_AT_ONCE_MAX: Final = 32
RECOVERY_PAGE_STREAMS: Final = 500
SYSTEM_APPEND_TRIES_MAX: Final = 50  # of one gateway among many that append to the same system stream

# The embedded PostgreSQL is started again when it ends: at once if it had stayed up for the steady time, else after
# pauses that double.
EMBEDDED_PAUSE_FIRST_MS: Final = 500
EMBEDDED_PAUSE_MAX_MS: Final = 30_000
EMBEDDED_STEADY_MS: Final = 60_000
EMBEDDED_LOOK_MS: Final = 1_000  # where its end cannot be waited for

# Tool servers: what a configuration may ask for, and what is read of an answer.
CALL_TIMEOUT_MS_MAX: Final = 600_000
CALL_ATTEMPTS_MAX: Final = ATTEMPTS_LISTED_MAX
UNREACHABLE_FOR_MS: Final = 120_000  # how long a server that takes no connections is waited for; each may have its own
UNREACHABLE_FOR_MS_MAX: Final = 86_400_000
CONFIG_BYTES_MAX: Final = 1_048_576
INPUT_SCHEMA_BYTES_MAX: Final = 65_536
TOOL_TAGS_MAX: Final = 16
APPROVAL_TIMEOUT_MS_MIN: Final = 1_000
APPROVAL_TIMEOUT_MS_MAX: Final = 31_536_000_000
APPROVAL_TIMEOUT_MS: Final = 86_400_000
SECRET_ARGUMENTS_MAX: Final = 16
POINTER_CHARS_MAX: Final = 256
CREDENTIALS_PER_SERVER_MAX: Final = 16
CREDENTIAL_BYTES_MAX: Final = 8_192
SERVER_CONCURRENCY_MAX: Final = 1_024
WEBHOOKS_MAX: Final = 64
URL_CHARS_MAX: Final = 2_048
# The highest that a configuration may set one of its own limits to.
CONFIGURED_LIMIT_MAX: Final = 1_000_000
RESPONSE_BYTES_READ_MAX: Final = 16_777_216
RESPONSE_HEADER_BYTES_MAX: Final = 65_536
# Of one answer: what may stand before its head and around its body. Framing grows with the body, which has its bound.
RESPONSE_INFORMATIONAL_MAX: Final = 16
RESPONSE_HEADERS_MAX: Final = 256
RESPONSE_FRAMING_BYTES_MAX: Final = 65_536
RESPONSE_FRAMING_BYTES_PER_BYTE: Final = 8  # a chunk of one byte has five around it
READ_STEP_BYTES: Final = 16_384
READ_AHEAD_BYTES_MAX: Final = 65_536
IDLE_CONNECTION_MS: Final = 15_000
CONNECT_STAGGER_MS: Final = 250  # between a name's addresses (RFC 8305)
# What all tool servers together may take of the event loop with what they send, beyond what each answer has of its own.
INTAKE_BURST_MS: Final = 5
INTAKE_REFILL_SHARE: Final = 0.01
INTAKE_TURN_MS: Final = 1
INTAKE_SHARE: Final = 0.2
RETRY_AFTER_MS_MAX: Final = 300_000
# Whether a server that is not MCP can be reached is looked at so often, each look taking at most so long.
REACH_CHECK_EVERY_MS: Final = 10_000
REACH_CHECK_MS: Final = 3_000
CONNECTIONS_PER_SERVER_MAX: Final = 64
# An output of more values is kept as bytes: parsing and writing them takes some 5 us each, in the loop.
OUTPUT_VALUES_MAX: Final = 10_000
SHOWN_CHARS_MAX: Final = 64
CLOSE_WAIT_MS: Final = 30_000
SWEEP_EVERY_MS: Final = 3_000
CLOCK_LOOK_EVERY_MS: Final = 60_000

# MCP servers. A message beyond the first is looked through in slices before it is read whole; the answer to a call
# beyond the second, any other beyond the third, is not read whole at all: parsed JSON takes up to thirty times its
# text. One line of a child's output beyond the last ends the child.
MCP_READ_AT_ONCE_BYTES_MAX: Final = 32_768
MCP_ANSWER_BYTES_MAX: Final = 327_680  # an output that may be stored, and what is around it
MCP_MESSAGE_BYTES_MAX: Final = 4_194_304
MCP_LINE_BYTES_READ_MAX: Final = 67_108_864
# What a server may say in a minute without being asked, on one stream: notifications, comments, greetings.
MCP_UNASKED_PER_MINUTE_MAX: Final = 50_000
MCP_UNASKED_BYTES_PER_MINUTE_MAX: Final = 67_108_864
MCP_REPLIES_PER_SECOND_MAX: Final = 10  # to what a server asks; it has nothing to ask but whether the gateway lives
# What is looked through for its outcome because it is too large to be read whole.
JSON_SCAN_DEPTH_MAX: Final = 512
JSON_SCAN_NUMBER_CHARS_MAX: Final = 4_096
JSON_SCAN_STEP_BYTES: Final = 2_048
MCP_TOOLS_MAX: Final = 512
MCP_PAGES_MAX: Final = 64
MCP_LISTING_BYTES_MAX: Final = MCP_MESSAGE_BYTES_MAX  # of all pages together
MCP_DEFINITION_BYTES_MAX: Final = 65_536
MCP_DESCRIPTION_CHARS_MAX: Final = 16_384
MCP_PROBLEMS_MAX: Final = 32
MCP_COMMAND_WORDS_MAX: Final = 128
MCP_ENVIRONMENT_MAX: Final = 64
MCP_STDERR_BYTES_KEPT: Final = 8_192
MCP_START_TIMEOUT_MS: Final = 60_000  # until a server answers for the first time; each may have its own
MCP_ANSWER_MS: Final = 30_000  # a page of the list of tools
MCP_START_WAIT_MS: Final = 10_000  # for all of them, before the gateway takes requests
MCP_READY_WAIT_MS: Final = 5_000
MCP_BACKOFF_FIRST_MS: Final = 200
MCP_BACKOFF_MAX_MS: Final = 30_000
MCP_STEADY_AFTER_MS: Final = 10_000
MCP_REFRESH_PAUSE_MS: Final = 250
MCP_REFRESH_PAUSE_MAX_MS: Final = 30_000
MCP_REFRESH_EVERY_MS: Final = 60_000
MCP_CANCEL_GRACE_MS: Final = 2_000
MCP_STOP_GRACE_MS: Final = 2_000
MCP_RETRY_MS_MAX: Final = 30_000
SCHEMA_STEPS_MAX: Final = 100_000
SCHEMA_STEPS_OF_SCHEMA_MAX: Final = 500_000  # to check a schema itself, in a thread: some 200 for each of its parts
SCHEMA_STEPS_ON_NOTHING_MAX: Final = 5_000
SCHEMA_REFERENCE_STEPS: Final = 4  # a reference costs that many times what another keyword does

# Pins. A server that says something else each time must not fill the record: what is beyond these is refused all the
# same, but not written down, until an operator accepts it.
PINS_AT_ONCE_MAX: Final = BATCH_BYTES_MAX // (MCP_DEFINITION_BYTES_MAX + ENCLOSING_BYTES)
PINS_PER_SERVER_MAX: Final = 2 * MCP_TOOLS_MAX
QUARANTINED_PER_PIN_MAX: Final = 8

# Keys, secrets and webhooks.
KEY_FILE_BYTES_MAX: Final = 1_024
ERASURE_DIGESTS_MAX: Final = 1_000  # listed one by one; those of longer streams are folded
CLAIM_SALT_BYTES: Final = 32
REDACTION_SALT_BYTES: Final = 32
WEBHOOK_TIMEOUT_MS: Final = 10_000
WEBHOOK_LEASE_MS: Final = 30_000
WEBHOOK_POSTS_AT_ONCE_MAX: Final = 4
WEBHOOK_POLL_MS: Final = 1_000
WEBHOOK_BACKOFF_FIRST_MS: Final = 1_000
WEBHOOK_BACKOFF_MAX_MS: Final = 600_000
CALLBACKS_KNOWN_MAX: Final = 4_096  # questions whose callback is known to have been taken; the rest is told again
WEBHOOK_NOTICES_MAX: Final = 1_000  # of what stands; the rest follows when some of it does no longer
OUTBOX_CLEAN_EVERY_MS: Final = 60_000
OUTBOX_CLEAN_ROWS_MAX: Final = 1_000

# Who is calling. What a credential may be, how long what is known of it is believed, and what an issuer may send.
CREDENTIAL_CHARS_MAX: Final = 8_192
API_KEY_LIFE_DAYS_MAX: Final = 36_500
ACCESS_CACHE_KEYS_MAX: Final = 4_096
ACCESS_CACHE_AGE_MS: Final = 5_000
ACCESS_LOOKUPS_AT_ONCE_MAX: Final = 2
ACCESS_LOOKUP_KEYS_MAX: Final = 256
LISTENER_BEAT_MS: Final = 5_000
JWT_HEADER_CHARS_MAX: Final = 1_024
JWT_LEEWAY_S: Final = 30
JWKS_BYTES_MAX: Final = 262_144
JWKS_KEYS_MAX: Final = 64
JWKS_TIMEOUT_MS: Final = 5_000
JWKS_REFRESH_EVERY_MS: Final = 10_000
JWKS_AGE_MAX_MS: Final = 600_000

# Signing in by OpenID Connect
OIDC_SCOPES_MAX: Final = 16
OIDC_DISCOVERY_BYTES_MAX: Final = 262_144
OIDC_DISCOVERY_AGE_MAX_MS: Final = 600_000
OIDC_RETRY_AFTER_MS: Final = 1_000  # after a discovery that failed
OIDC_ANSWER_BYTES_MAX: Final = 262_144
OIDC_TIMEOUT_MS: Final = 10_000
OIDC_EXCHANGES_MAX: Final = 16  # at once; the others wait
OIDC_CODE_CHARS_MAX: Final = 4_096
OIDC_SIGN_IN_MS: Final = 600_000  # from the button to the way back
OIDC_SIGN_INS_MAX: Final = 8  # begun in one browser and not ended

# The HTTP edge. A request must arrive whole within these, and what is read of one that is refused is bounded too.
HEADER_BYTES_MAX: Final = 32_768
# Of a request whose head is that of the one before it: longer ones are parsed anew. One head is kept a connection.
KNOWN_HEAD_BYTES_MAX: Final = 2_048
KNOWN_REQUEST_BYTES_MAX: Final = 65_536
KNOWN_HEAD_TRIES: Final = 4
HEADERS_WAIT_MS: Final = 10_000
BODY_WAIT_MS: Final = 30_000
DISCARDED_BYTES_MAX: Final = 16_777_216
LINGER_MS: Final = 2_000  # without a byte
LINGER_MS_MAX: Final = BODY_WAIT_MS  # however it sends
KEEP_ALIVE_S: Final = 65
CONNECTIONS_MAX: Final = 8_192
DESCRIPTORS_RESERVED: Final = 256  # for the database, files and children; tool servers' connections come on top
PIPELINED_REQUESTS_MAX: Final = 64
CALL_WAIT_MS: Final = 30_000
CALL_WAIT_MS_MAX: Final = 120_000
SHUTDOWN_GRACE_MS: Final = 10_000
SHUTDOWN_LAST_MS: Final = 5_000
GARBAGE_LOOKED_FOR_AFTER: Final = 10_000  # objects that were made and not freed

# Sessions to PostgreSQL: a pool, and a few besides (the executor's, two that listen, the sequencer's, one at start).
POOL_SESSIONS_MAX: Final = 8
POOL_SESSIONS_MIN: Final = 2
SESSIONS_BESIDE_POOL: Final = 5
DATABASE_CONNECTIONS_MAX: Final = 10_000
DATABASE_CONNECTIONS_MIN: Final = POOL_SESSIONS_MIN + SESSIONS_BESIDE_POOL
DATABASE_CONNECTIONS: Final = 90  # of the 100 that PostgreSQL usually admits; commands need some

# Several processes on one port.
PROCESSES_MAX: Final = 64
PROCESS_START_MS: Final = 120_000  # until it takes requests; what takes longer is ended
PROCESS_STOP_MS: Final = 2 * SHUTDOWN_GRACE_MS + SHUTDOWN_LAST_MS + CLOSE_WAIT_MS + 15_000  # after that it is killed
# One that ends is replaced: at once if it had served for the steady time, else after pauses that double.
PROCESS_PAUSE_FIRST_MS: Final = 500
PROCESS_PAUSE_MAX_MS: Final = 30_000
PROCESS_BEAT_MS: Final = 2_000  # how often each is asked for a sign of life
PROCESS_SILENT_MS: Final = 20_000  # one that gives none for so long is given no connections while another does
PROCESS_ANSWER_MS: Final = 3_000  # for what other processes show; one that does not answer is left out
PROCESS_STEADY_MS: Final = 60_000
READY_CHECK_MS: Final = 2_000
READY_BELIEVED_MS: Final = 500
PRINCIPALS_REMEMBERED: Final = 1_024

# The policy. Cedar's parser recurses on the machine's stack: brackets and operators beyond these could overflow it and
# end the process. Values are counted in arguments that a policy reads, those without a form in Cedar as
# five: 10,000 take some 0.1 s at worst.
POLICY_BYTES_MAX: Final = 262_144
POLICY_NESTING_MAX: Final = 64
POLICY_OPERATORS_MAX: Final = 500
POLICY_VALUES_MAX: Final = 10_000
POLICY_IDS_MAX: Final = 64
POLICY_MEMORY_VERDICTS_MAX: Final = 1_024
POLICY_MEMORY_CONTEXT_BYTES_MAX: Final = 512
POLICY_TOOLS_AT_ONCE: Final = 16  # put to the policy in one go, some 0.2 ms each, when a principal lists its tools

# Reading over HTTP. Rows looked at, not only rows answered: a filter that nothing fits costs no more than one page.
LIST_ITEMS_DEFAULT: Final = 50
LIST_ITEMS_MAX: Final = 200
LIST_ROWS_LOOKED_AT_MAX: Final = 5_000
LIST_PREFIX_ROWS_MAX: Final = 1_000  # runs whose ids begin so, up to which these alone are looked at
# The fold of calls: plans in one transaction, how often it looks, and for how long it leaves the store to calls.
FOLD_ROWS_MAX: Final = 500
FOLD_EVERY_MS: Final = 1_000
FOLD_PAUSE_TIMES: Final = 19
FOLD_PAUSE_MS_MAX: Final = 10_000
FOLD_BEHIND_MS_MAX: Final = 60_000  # without having reached the end; from then on it takes a quarter of a session
FOLD_PAUSE_TIMES_WHEN_BEHIND: Final = 3
REPLAYED_TOOLS_MAX: Final = 10_000
VERIFICATION_PAUSE_TIMES: Final = 4
LOG_VERIFICATIONS_KEPT: Final = 20  # of each tenant
LOG_VERIFICATION_SAVE_MS: Final = 1_000
LOG_VERIFICATION_SILENT_MS: Final = 30_000  # a gateway that has not saved for so long is gone
VERIFICATION_FINDINGS_MAX: Final = 100
VERIFICATION_LEAVES_MAX: Final = 200  # of how many entries an answer says the leaf
POLICY_SETS_PAGE_MAX: Final = 20  # each with its text
SERVER_LATENCY_WINDOW_S: Final = 3_600
STATS_WINDOW_DAYS_MAX: Final = 400
STATS_TOOLS_MAX: Final = 200
APPROVALS_COUNTED_MAX: Final = 100  # on every page of the console; of one agent's own, so many times ten are looked at
STANDING_COUNTED_MAX: Final = 1_000
FIND_CHARS_MAX: Final = 255  # as long as the longest idempotency key
FIND_ITEMS_MAX: Final = 100
FEED_ROWS_LOOKED_AT_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 1_048_576  # an item that is larger stands on a page alone
EVENTS_PAGE_BYTES_MAX: Final = 65_536  # a follower that does not read holds one
READS_AT_ONCE_MAX: Final = 3  # of the eight sessions that everything else needs too
READ_WAIT_MS: Final = 30_000
READ_PAUSE_TIMES: Final = 4  # while a call is under way a reader's place rests so many times what its query took
READ_PAUSE_MS_MAX: Final = 100
CURSOR_CHARS_MAX: Final = 128
QUERY_PARAMETERS_MAX: Final = 16
# More entries than any transaction appends: a made-up cursor cannot ask for more to be skipped.
TRANSACTION_ENTRIES_MAX: Final = 16_384
FEED_POLL_MS: Final = 250
EVENTS_HEARTBEAT_MS: Final = 15_000
EVENTS_SEND_WAIT_MS: Final = 30_000

# Signed notes. Sixteen signatures must be admitted; ours have one.
NOTE_BYTES_MAX: Final = 65_536
NOTE_SIGNATURES_MAX: Final = 64

# Exported bundles. A line holds an entry and its artifact as JSON text, which at worst doubles them.
BUNDLE_LINE_BYTES_MAX: Final = 2_097_152
BUNDLE_MANIFEST_BYTES_MAX: Final = 262_144
BUNDLE_FILES_MAX: Final = 256
BUNDLE_PARTIAL_HEADS_MAX: Final = 64  # with a consistency proof each; a complete bundle carries them all
BUNDLE_STREAMS_IN_MEMORY_MAX: Final = 10_000
BUNDLE_FINDINGS_MAX: Final = 1_000  # a bundle with more is as broken as one can be
# Verification in several processes: what all of them keep in memory, and below which size one is as fast.
BUNDLE_FORKS_SHARED_MAX: Final = 100_000
BUNDLE_VOUCHING_SHARED_MAX: Final = 100_000
# Lines of traces that are held back until their last one is there: of the last so many lines, and so many bytes.
WHOLE_LINES_MAX: Final = 8_192
WHOLE_BYTES_MAX: Final = 16 * 1024 * 1024
BUNDLE_SHARED_FROM_BYTES: Final = 32 * 1024 * 1024
LEDGER_SHARED_FROM_STREAMS: Final = 10_000
LEDGER_PIECES_A_JOB: Final = 16  # each holds a few cursors open until the end
LEDGER_PIECE_STREAMS_MIN: Final = 500
VERIFY_JOBS_MAX: Final = 256
EXPORT_PAGE_ENTRIES: Final = 1_024
EXPORT_COVER_WAIT_MS: Final = 5_000  # for a head that covers what was erased just now
EXPORT_COVER_POLL_MS: Final = 100

# The log. Rows looked at in one round; how often one is made; how long an open transaction may hold the log back before
# it is told who does; at most how long until what failed is tried again.
LOG_BATCH_ROWS_MAX: Final = 2_000
LOG_LEAVES_AT_HAND_MAX: Final = 8_000  # hashes that a round keeps for its proof
LOG_ROUND_MS: Final = 200
LOG_STANDBY_MS: Final = 250
LOG_STALL_MS: Final = 5_000
LOG_RETRY_MAX_MS: Final = 2_000
# The search for entries that slipped past the sequencer: so many rows, so often. A million entries take 17 minutes.
LOG_LOOK_ROWS_MAX: Final = 2_000
LOG_LOOK_EVERY_MS: Final = 2_000
LOG_ORIGIN_CHARS_MAX: Final = 200  # leaves room for `/epoch-2`
EPOCH_WAIT_MS: Final = 30_000
RECEIPT_WAIT_MS: Final = 1_000
RECEIPT_POLL_MS: Final = 50

# The gateway as an MCP server. How long a call without a task is held; how long an answer that did not arrive is owed
# to a re-issue; how long it may take a client's system to say that the answer arrived.
MCP_HOLD_MS: Final = 50_000
MCP_HOLD_MS_MAX: Final = 600_000
MCP_TASK_AFTER_MS: Final = 10_000
MCP_REISSUE_WINDOW_MS: Final = 900_000
MCP_DELIVERY_WAIT_MS: Final = 10_000
MCP_STREAM_AFTER_MS: Final = 5_000
MCP_PING_EVERY_MS: Final = 10_000
MCP_NAME_CHARS_MAX: Final = 64
MCP_PAGE_TOOLS: Final = 100
MCP_LIST_TTL_MS: Final = 5_000
MCP_POLL_INTERVAL_MS: Final = 2_000
MCP_WATCH_EVERY_MS: Final = 1_000
MCP_TASK_IDS_MAX: Final = 64
MCP_PROGRESS_QUEUED_MAX: Final = 256
MCP_ALLOWED_MAX: Final = 64
MCP_BRIDGE_LINE_BYTES_MAX: Final = 16_777_216
MCP_BRIDGE_TRIES_MAX: Final = 60

# Runs.
RUN_PATH_CHARS_MAX: Final = 96
RUN_PATH_LEVELS_MAX: Final = 16
RUN_BRANCHES_MAX: Final = 1_000
RUN_CHILD_LEVELS_MAX: Final = 32  # children of children: a program that starts itself ends there
RUN_OPEN_BELOW_MAX: Final = 10_000  # children of one run, theirs and so on, that are open at the same time
RUN_AWAITS_MAX: Final = RUN_BRANCHES_MAX
RUN_ESCALATIONS_MAX: Final = 8  # of one question
RUN_INLINE_BYTES_MAX: Final = 32_768
RUN_LOG_LINES_MAX: Final = 64
RUN_LOG_CHARS_MAX: Final = 1_024
RUN_STATE_CHANGES_MAX: Final = 256
RUN_STATE_BYTES_MAX: Final = 1_048_576
RUN_ENTRIES_MAX: Final = 1_000_000
RUN_TAGS_MAX: Final = 16
RUN_SIGNAL_IDS_KEPT: Final = 256
RUN_CHECKPOINT_EVERY_ENTRIES: Final = 100
RUN_CHECKPOINT_LATEST_ENTRIES: Final = 1_000  # after which one is written however large it is
RUN_CHECKPOINT_BYTES_MAX: Final = 8_388_608  # the state, what has begun, signals that wait
RUN_CHECKPOINT_KEYS_MAX: Final = 2_000_000  # as many as can stand in so many bytes

# Procedures. A name leaves room for what makes it the id of a run: a colon, and the digest of an event's id.
PROCEDURE_NAME_CHARS_MAX: Final = 63
PROCEDURES_PER_TENANT_MAX: Final = 1_000
PROGRAMS_PER_PROCEDURE_MAX: Final = 10_000
PROCEDURE_TRIGGERS_MAX: Final = 16
# Submitted programs. A body with source and small files fits into DOCUMENT_BYTES_MAX; larger files are blobs before.
LUA_SOURCE_BYTES_MAX: Final = 131_072
LUA_FILE_BYTES_MAX: Final = 1_048_576
LUA_FILES_BYTES_MAX: Final = 4_194_304  # all files of one program together
LUA_FILES_MAX: Final = 32
LUA_FILE_NAME_CHARS_MAX: Final = 128
LUA_CHILDREN_MAX: Final = 64
LUA_SLOTS_MAX: Final = 256
LUA_MEMORY_BYTES_MIN: Final = 1_048_576  # of one run's Lua state
LUA_MEMORY_BYTES_MAX: Final = 1_073_741_824
LUA_CPU_MS_MAX: Final = 3_600_000
LUA_OPERATIONS_MAX: Final = 1_000_000
LUA_OFFERS_MAX: Final = 256  # programs that one lease names
LUA_LOOK_EVERY_MS: Final = 1_000  # for programs that were submitted through other gateways
LUA_LINT_CPU_S: Final = 20
LUA_LINT_BYTES: Final = 1_073_741_824  # of address space
LUA_HTTP_HOSTS_MAX: Final = 64
LUA_HTTP_BYTES: Final = 131_072  # of an answer; with its headers it must fit into a tool effect
LUA_HTTP_BYTES_MAX: Final = 180_000
LUA_HTTP_TIMEOUT_MS: Final = 10_000
LUA_HTTP_TIMEOUT_MS_MAX: Final = 60_000
LUA_HTTP_REDIRECTS_MAX: Final = 5
SCHEDULES_PER_TENANT_MAX: Final = 1_000
SCHEDULES_AT_ONCE_MAX: Final = 50  # that a gateway takes in one round
SCHEDULE_CATCH_UP_MAX: Final = 100  # runs of one schedule for times at which no gateway ran: the latest
SCHEDULE_LATE_MS: Final = 60_000  # a time that is further in the past was missed
SCHEDULE_HOLD_MS: Final = 30_000  # for so long no other gateway takes a schedule that one has taken
SCHEDULES_EVERY_MS: Final = 1_000
PROCEDURES_KEPT_MAX: Final = 256  # registrations with their schemas, in a gateway's memory

# The engine of runs. One that waits for a tool or a child is looked at again after this long, then after as long as it
# has waited.
RUN_RECHECK_MS: Final = 60_000
RUN_RECHECK_MAX_MS: Final = 86_400_000
RUN_PUTS_MAX: Final = 64
RUN_PUT_BYTES_MAX: Final = 262_144
RUN_LISTED_ENTRIES_MAX: Final = 24  # of each listed run, by their kind alone
RUN_PAGE_RECORDS_MAX: Final = 1_000
RUN_PAGE_BYTES_MAX: Final = 1_048_576
RUN_TRIES_MAX: Final = 50  # of one change of a run that others change at the same time
RUNS_CACHED_MAX: Final = 2_048
RUNS_CACHED_BYTES_MAX: Final = 134_217_728  # of their states
RUN_LEASE_MS: Final = 30_000
RUN_LEASE_MS_MIN: Final = 500
RUN_LEASE_MS_MAX: Final = 3_600_000
RUN_LEASE_WAIT_MS_MAX: Final = 60_000
RUN_SLOTS_MAX: Final = 256
RUN_WORKERS_KNOWN_MAX: Final = 10_000  # of which a gateway remembers when they were last seen
RUN_SWEEP_MS: Final = 2_000
RUN_SWEEP_RUNS_MAX: Final = 200
RUN_READY_POLL_MS: Final = 5_000
RUN_READY_AGAIN_MS: Final = 50  # after a look that found none, for workers that ask meanwhile
RUN_HOLD_MS: Final = 5_000
RUN_SALT_KEPT_MS: Final = 2_000  # in memory, of a run that was started here, until its worker asks for it
RUN_SALTS_KEPT_MAX: Final = 1_000
RUN_ANNOUNCE_TICK_MS: Final = 5

# Telemetry. Series of one metric whose labels strangers choose; all others are counted under `other`.
METRIC_SERIES_MAX: Final = 500
METRICS_COUNTED_MAX: Final = 10_000  # of what stands in the store: beyond it, one more is shown
METRICS_STORE_EVERY_MS: Final = 5_000  # how often the store is asked, however often the metrics are
METRICS_STORE_WAIT_MS: Final = 2_000
LOG_MESSAGE_CHARS_MAX: Final = 8_192
LOG_TRACEBACK_CHARS_MAX: Final = 65_536
LOG_LINES_QUEUED_MAX: Final = 20_000  # of calls, waiting to be written
LOG_LINES_EVERY_MS: Final = 100
SPANS_QUEUED_MAX: Final = 16_384
SPANS_AT_ONCE_MAX: Final = 512
SPANS_EVERY_MS: Final = 1_000
SPANS_EXPORT_MS: Final = 10_000  # for one export, its repeats included

# Blobs. What is uploaded or read goes through in pieces; a part of an upload is as large as S3 wants it at least.
BLOB_BYTES_DEFAULT: Final = 268_435_456
BLOB_BYTES_MAX: Final = 5_368_709_120
BLOB_PART_BYTES: Final = 5_242_880
BLOB_PARTS_AT_ONCE: Final = 2
BLOB_PIECE_BYTES: Final = 262_144  # of a folder, and of what is sent to a client
BLOB_RANGE_BYTES: Final = 4_194_304  # asked of an object store at once
BLOB_TRANSFERS_MAX: Final = 16  # uploads and downloads at the same time, in one gateway
BLOB_SEND_WAIT_MS: Final = 30_000  # without the client taking anything
BLOB_BODY_BYTES_MIN: Final = 262_144  # of an upload within BODY_WAIT_MS: slower ones hold a place for nothing
BLOB_GOING_WAIT_MS: Final = 2_000  # for collection to end, before an upload is told to come back
# Collection. A blob that was not touched for a day and that no entry refers to is deleted. A deletion that was begun
# and not ended is begun again after a while: much later than any request to the object store can still be under way.
BLOB_IDLE_MS: Final = 86_400_000
BLOB_RETRY_MS: Final = 900_000
BLOB_DELETE_WITHIN_MS: Final = 300_000
BLOB_STORE_TIMEOUT_MS: Final = 60_000
BLOBS_COLLECTED_AT_ONCE: Final = 100
BLOBS_COLLECT_EVERY_MS: Final = 60_000

# The console. A page stays under 200 KB whatever a tool, an agent or a description says; there is a way to all of it.
CONSOLE_SESSION_MS: Final = 28_800_000
CONSOLE_SESSION_MS_MIN: Final = 300_000
CONSOLE_SESSIONS_KNOWN_MAX: Final = 4_096
CONSOLE_SESSION_CHARS_MAX: Final = 4_096
CONSOLE_FORM_BYTES_MAX: Final = 262_144
CONSOLE_JSON_CHARS_MAX: Final = 4_096  # of one value, before "all of it"
CONSOLE_VALUE_CHARS_MAX: Final = 2_000  # of one text that a caller, program or tool server wrote
CONSOLE_DEPTH_MAX: Final = 24
CONSOLE_ROWS_MAX: Final = 50
CONSOLE_BEAT_MS: Final = 2_000  # a live page notices within a few seconds that the gateway is gone
