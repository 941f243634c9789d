"""Every error that leaves this system, one class per stable code.

A code never changes its meaning. Edges map codes to HTTP statuses and exit codes; nothing here knows them.
`docs/errors.md` is generated from this file.
"""

from __future__ import annotations

from typing import ClassVar


class TgaError(Exception):
    """What went wrong, what was expected, what was found, and what to do next."""

    code: ClassVar[str]
    meaning: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
        stream: str | None = None,
        sequence_number: int | None = None,
        is_lasting: bool = False,
    ) -> None:
        """`is_lasting`: asking again does not help this time, though it does for others with this code."""
        self.what = what
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.next_step = remedy if remedy is not None else self.remedy
        self.stream = stream
        self.sequence_number = sequence_number
        self.is_lasting = is_lasting
        super().__init__(what)

    def __str__(self) -> str:
        where = ""
        if self.stream is not None:
            where = f"{self.stream}: "
            if self.sequence_number is not None:
                where = f"{self.stream}, entry {self.sequence_number}: "
        parts = [f"{self.code}: {where}{self.what}"]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        return "; ".join(parts) + f". {self.next_step}"

    def at(self, *, stream: str, sequence_number: int | None = None) -> TgaError:
        """The same error, saying at which stream and entry; what it already says stays."""
        if self.stream is None:
            self.stream = stream
        if self.sequence_number is None:
            self.sequence_number = sequence_number
        return self


class InvalidTransition(TgaError):
    code = "STATE_INVALID_TRANSITION"
    meaning = "The stream's state does not admit this artifact, or the artifact does not lead to the state claimed."
    remedy = "Read the stream's state again and append only what its transition table admits."


class SequenceGap(TgaError):
    code = "STATE_SEQUENCE_GAP"
    meaning = "An entry's sequence number is not the one after its predecessor's: missing, repeated or out of order."
    remedy = "Read the stream's head again; if a stored log says this, run `tga verify` and keep the database as it is."


class ChecksumMismatch(TgaError):
    code = "STATE_CHECKSUM_MISMATCH"
    meaning = "A digest or a link of the hash chain does not fit the bytes it stands for."
    remedy = "Nothing was dispatched or changed. Run `tga verify` and treat the stored log as tampered with."


class CheckpointMissing(TgaError):
    code = "CHECKPOINT_MISSING"
    meaning = "An execution checkpoint that is written together with its entry is not there: someone removed it."
    remedy = (
        "Nothing is lost: the log says the same. Keep the database as it is, and find out who could delete the row."
    )


class RecoveryFailed(TgaError):
    code = "STATE_RECOVERY_FAILED"
    meaning = "The chain is sound, but the trace cannot go on: what it needs is missing, or claim and log disagree."
    remedy = (
        "Restore what is missing, then recover the trace again. A call whose tool is gone for good is ended with "
        "`tga resolve`."
    )


class LockAcquireFailed(TgaError):
    code = "STATE_LOCK_ACQUIRE_FAILED"
    meaning = "The stream's lock was not obtained in time."
    remedy = "Try again; if it persists, look for a session that holds the lock in pg_locks."


class ConcurrentExecution(TgaError):
    code = "STATE_CONCURRENT_EXECUTION"
    meaning = "A living executor owns the stream, or another one moved its head first."
    remedy = "Read the stream again; its owner continues it."


class InputMalformed(TgaError):
    code = "INPUT_MALFORMED"
    meaning = (
        "The request cannot be read: not strict JSON (bad syntax or UTF-8, repeated keys, a value that JSON cannot "
        "carry safely), or a header, parameter or part of it that is none."
    )
    remedy = (
        "Send strict JSON: UTF-8, unique keys, finite numbers, integers within 2^53 - 1, no lone surrogate, no NUL."
    )


class InputTooLarge(TgaError):
    code = "INPUT_TOO_LARGE"
    meaning = "A document exceeds one of the limits in app/core/limits.py: bytes, depth, keys, or digits of a number."
    remedy = "Send less, or send a reference to it."


class SchemaViolation(TgaError):
    code = "SCHEMA_VIOLATION"
    meaning = "A document does not fit its JSON Schema in schemas/tga/v1."
    remedy = "Correct the field that is named."


class TraceNotFound(TgaError):
    code = "TRACE_NOT_FOUND"
    meaning = "No entry of this trace exists."
    remedy = "Check the id; `tga verify --all` tells whether entries are missing that should exist."


class KeyClaimed(TgaError):
    """The loser of a claim stores nothing; `owner_stream` is the trace that has the key.

    `winner`: what the store has of that trace (domain/tga/ports.py, RecordedCall), where it came with the refusal.
    """

    code = "IDEMPOTENCY_KEY_CLAIMED"
    meaning = "Another trace already owns this idempotency key for this server and tool."
    remedy = "Answer from the trace that owns the key; nothing was stored for this one."

    def __init__(
        self, what: str, *, owner_stream: str, owner_payload_digest: str, winner: object | None = None
    ) -> None:
        super().__init__(what, found=owner_stream)
        self.owner_stream = owner_stream
        self.owner_payload_digest = owner_payload_digest
        self.winner = winner


class KeyReused(TgaError):
    code = "IDEMPOTENCY_KEY_REUSED"
    meaning = "This idempotency key belongs to another call: other arguments, or another principal."
    remedy = "Use a new key for a new call; repeat a call only with exactly its own arguments. Nothing was executed."


class CallInFlight(TgaError):
    code = "CALL_IN_FLIGHT"
    meaning = "A call with this key is not over: a living executor executes it, or it waits for a person."
    remedy = "Repeat the call with the same key later; it will be answered with the recorded effect."


class ToolNotFound(TgaError):
    code = "TOOL_NOT_FOUND"
    meaning = "No configured server has a tool of this name."
    remedy = "Check server and tool against the configuration file."


class ArgumentsInvalid(TgaError):
    code = "ARGUMENTS_INVALID"
    meaning = "The arguments do not fit the tool's input schema. Nothing was stored."
    remedy = "Correct the path that is named."


class KeyMissing(TgaError):
    code = "IDEMPOTENCY_KEY_MISSING"
    meaning = "A write-class tool was called without an idempotency key. Nothing was stored."
    remedy = "Send a key of your own choosing, the same one for every repeat of this call."


class KeyReserved(TgaError):
    code = "IDEMPOTENCY_KEY_RESERVED"
    meaning = "The idempotency key begins as the keys of runs do. Nothing was stored."
    remedy = "Use a key that does not begin with `run:`."


class TraceNotHeld(TgaError):
    code = "TRACE_NOT_HELD"
    meaning = (
        "A resolution was given for a trace that neither waits for an operator nor is beyond sending, or for another "
        "tool call of it."
    )
    remedy = "Look at the trace again and resolve what it shows."


class StoreBusy(TgaError):
    code = "STORE_BUSY"
    meaning = "More is waiting to be committed than the writer takes. Nothing was stored."
    remedy = "Try again in a moment."


class StoreUnavailable(TgaError):
    code = "STORE_UNAVAILABLE"
    meaning = "PostgreSQL cannot be reached or refused the session; nothing was sent to it."
    remedy = "Check that the server runs and that TGA_DATABASE_URL names it."


class OutcomeUnknown(TgaError):
    code = "STORE_OUTCOME_UNKNOWN"
    meaning = "A commit was sent and its answer was lost: it may have happened."
    remedy = "Take the stream's lock and read it again before anything else."


class StoreUnfit(TgaError):
    code = "STORE_UNFIT"
    meaning = "This PostgreSQL cannot keep the promises: too old, unsafe settings, or guards missing."
    remedy = "Set right what is named, then start again."


class MigrationRefused(TgaError):
    code = "MIGRATION_REFUSED"
    meaning = "The database's schema is not what this version's migrations lead to."
    remedy = "Use the version that made the schema, or restore the migration files as they were."


class EmbeddedPostgresFailed(TgaError):
    code = "EMBEDDED_POSTGRES_FAILED"
    meaning = "The bundled PostgreSQL could not be started, reached or stopped."
    remedy = "Read the server's log that is named, or name a server of your own in TGA_DATABASE_URL."


class BackupFailed(TgaError):
    code = "BACKUP_FAILED"
    meaning = "A backup could not be written, read or restored; what was there before is as it was."
    remedy = "Read what the program said, mend that, and try again."


class SettingInvalid(TgaError):
    code = "SETTING_INVALID"
    meaning = "A setting, or a line of the configuration file, has a value that cannot be used."
    remedy = "Correct what is named."


class Unauthenticated(TgaError):
    code = "UNAUTHENTICATED"
    meaning = "No credential was sent, or it is unknown, expired, revoked or not verifiable. Which is not told."
    remedy = "Send `Authorization: Bearer <key>` with a valid API key or token."


class Forbidden(TgaError):
    code = "FORBIDDEN"
    meaning = "The principal is known, but its roles do not admit this."
    remedy = "Ask for a key with the role that is named."


class IssuerUnavailable(TgaError):
    code = "ISSUER_UNAVAILABLE"
    meaning = "The identity provider could not be reached, or its answer cannot be used. Nobody was signed in."
    remedy = "Try again in a moment. If it stays so: `tga doctor` says what the provider answers."


class SignInExpired(TgaError):
    code = "SIGN_IN_EXPIRED"
    meaning = "The way back from the identity provider belongs to no sign-in that this browser has under way."
    remedy = "Begin again, in this browser, and come back within 10 minutes."


class SignInRefused(TgaError):
    code = "SIGN_IN_REFUSED"
    meaning = "The identity provider refused, or what it said of who signs in is not believed."
    remedy = "Begin again. If it stays so, show this to whoever runs the gateway."


class CallDenied(TgaError):
    """The trace says who denied the call, and why."""

    code = "CALL_DENIED"
    meaning = "The call was denied: by the policy, by a person, by its expiry, or by its own caller."
    remedy = "Read the decision: who denied it, and why. Do not ask again unless something has changed since."


class ConfirmationNeeded(TgaError):
    code = "CONFIRMATION_NEEDED"
    meaning = "The command changes or destroys something, and there was nobody to ask. Nothing was done."
    remedy = "Run it on a terminal, or give --yes if it is meant."


class AlreadyDecided(TgaError):
    code = "ALREADY_DECIDED"
    meaning = "The request is no longer waiting: it was decided before. A decision is used once."
    remedy = "Look at the trace; nothing was changed."


class RequestMismatch(TgaError):
    code = "REQUEST_MISMATCH"
    meaning = "The decision names another action request than the one that waits. A decision binds to exact bytes."
    remedy = "Read the request again and decide on what it says now."


class ApprovalExpired(TgaError):
    code = "APPROVAL_EXPIRED"
    meaning = "The request's time was over, by the database's clock, before the decision was committed."
    remedy = "Have the call asked for again, with a new key."


class ApprovalNotExpired(TgaError):
    code = "APPROVAL_NOT_EXPIRED"
    meaning = "An expiry was to be recorded before the request's time was over, by the database's clock."
    remedy = "Wait; the sweep comes again."


class SignatureInvalid(TgaError):
    code = "SIGNATURE_INVALID"
    meaning = "A decision's signature is missing, not by the key it names, or by a key that is not its principal's."
    remedy = "Sign the canonical decision with the registered key; docs/approvals.md says what is signed."


class ToolQuarantined(TgaError):
    code = "TOOL_QUARANTINED"
    meaning = "The tool's definition is not the one that is pinned. Nothing was stored or sent."
    remedy = "Have an operator look at the change and accept it: `tga servers`, then `tga servers accept`."


class SecretMissing(TgaError):
    code = "SECRET_MISSING"
    meaning = "A sealed value cannot be opened: its key is not here, or it does not fit what the record commits to."
    remedy = (
        "Put the sealing key back into the keys folder, then recover the trace again. If it is lost for good, find out "
        "what became of the call and say so with `tga resolve`."
    )


class TraceErased(TgaError):
    code = "TRACE_ERASED"
    meaning = "The trace's payloads were erased; its entries and digests stand."
    remedy = "The erasure is on the system stream. Nothing else can be told."


class StreamInUse(TgaError):
    code = "STREAM_IN_USE"
    meaning = (
        "What an open run refers to is not erased: its tool calls, its children, and the run that it was forked from."
    )
    remedy = "Wait until that run has ended, or cancel it; then erase again."


class TraceUnfinished(TgaError):
    code = "TRACE_UNFINISHED"
    meaning = "Only the payloads of a finished trace can be erased."
    remedy = "Wait until it is COMPLETED, FAILED or DENIED."


class RunUnfinished(TgaError):
    code = "RUN_UNFINISHED"
    meaning = "Only the payloads of a run that has ended for good can be erased."
    remedy = "Wait until it is COMPLETED, or cancel it: `tga run cancel ID`."


class RateLimited(TgaError):
    code = "RATE_LIMITED"
    meaning = "The principal sends requests faster than its rate."
    remedy = "Wait for the seconds in Retry-After."

    def __init__(self, what: str, *, expected: object = None, retry_after_s: int = 1) -> None:
        super().__init__(what, expected=expected)
        self.retry_after_s = retry_after_s


class TooManyInFlight(TgaError):
    code = "TOO_MANY_IN_FLIGHT"
    meaning = "The principal has as many requests in flight as it may have."
    remedy = "Wait until some are answered."


class GatewayBusy(TgaError):
    code = "GATEWAY_BUSY"
    meaning = "The gateway, or the tool server's line, is full. Nothing was stored."
    remedy = "Try again after the seconds in Retry-After."


class ShuttingDown(TgaError):
    code = "SHUTTING_DOWN"
    meaning = "The gateway is about to stop and takes nothing new. Nothing was stored."
    remedy = "Try again after the seconds in Retry-After."


class RouteNotFound(TgaError):
    code = "ROUTE_NOT_FOUND"
    meaning = "There is nothing at this path."
    remedy = "See /openapi.json for what there is."


class MethodNotAllowed(TgaError):
    code = "METHOD_NOT_ALLOWED"
    meaning = "The path exists, but not with this method."
    remedy = "Use a method that the Allow header names."


class HeadersTooLarge(TgaError):
    code = "HEADERS_TOO_LARGE"
    meaning = "The request line and headers exceed their limit."
    remedy = "Send smaller headers."


class RequestTimeout(TgaError):
    code = "REQUEST_TIMEOUT"
    meaning = "The request did not arrive whole in time."
    remedy = "Send it again. Nothing was stored."


class InternalError(TgaError):
    code = "INTERNAL"
    meaning = "A defect of the gateway. What was recorded stands, and recovery continues it."
    remedy = "Report it with the incident id, which also stands in the gateway's log."


class AccessNotFound(TgaError):
    code = "ACCESS_NOT_FOUND"
    meaning = "There is no such API key, tenant or registered signing key."
    remedy = "See `tga keys list` and `tga tenants list`."


class PolicyInvalid(TgaError):
    code = "POLICY_INVALID"
    meaning = "The policy file is not valid Cedar, or asks for what the gateway does not know."
    remedy = "Correct it; `tga policy check FILE` names the place. A running gateway keeps the policy it has."


class GatewayUnreachable(TgaError):
    code = "GATEWAY_UNREACHABLE"
    meaning = "The command could not reach a gateway over HTTP, or what answered was none."
    remedy = "Start one with `tga serve`, or name it in TGA_URL."


class NoteInvalid(TgaError):
    code = "NOTE_INVALID"
    meaning = "A signed tree head or proof cannot be read, or no trusted key has signed it."
    remedy = "Get it again from the gateway; make sure that the public key is the log's own."


class ProofInvalid(TgaError):
    code = "PROOF_INVALID"
    meaning = "A Merkle proof does not show what it is said to show."
    remedy = "Treat the log as tampered with until a proof from it verifies."


class NotYetLogged(TgaError):
    code = "NOT_YET_LOGGED"
    meaning = "It stands on the record, but no signed tree head covers it yet."
    remedy = "Ask again in a second. If that lasts, the gateway's log says who holds the sequencer up."


class VerificationUnfinished(TgaError):
    code = "VERIFICATION_UNFINISHED"
    meaning = "A process of the verification ended before it had judged its share: there is no verdict."
    remedy = "Verify again. If it was ended for want of memory, use fewer processes: --jobs 1 stays in one."


class EntryUnlogged(TgaError):
    code = "ENTRY_UNLOGGED"
    meaning = "An entry stands on the record that the sequencer never saw: no signed tree head will ever cover it."
    remedy = (
        "Someone wrote into the tables behind the gateway's back. Believe nothing that the entry says, keep the "
        "database as it is, and find out who has the superuser's rights."
    )


class LogForked(TgaError):
    code = "LOG_FORKED"
    meaning = "The ledger does not begin with what a tree head, signed earlier, says it begins with."
    remedy = (
        "Nothing was signed. An old backup was restored, or history was changed: `tga verify --all --head FILE` tells. "
        "If an old backup is all there is, `tga log new-epoch` goes on and says so; see docs/operations.md."
    )


class BundleInvalid(TgaError):
    code = "BUNDLE_INVALID"
    meaning = "An exported bundle cannot be read, is unfinished, or its files are not what its manifest says."
    remedy = "Get it again, or finish it with `tga export --resume`; if it stays so, it was changed after its export."


class RunPositionTaken(TgaError):
    code = "RUN_POSITION_TAKEN"
    meaning = "An operation of the run has begun or ended at this address already, and it was another one."
    remedy = "Read the journal from the last entry that the worker has seen, and go on from there."


class RunPositionGap(TgaError):
    code = "RUN_POSITION_GAP"
    meaning = "An operation of the run was put at an address before which another one must come."
    remedy = "Put the operations of a scope in their order; concurrent ones go into branches of a gather."


class RunCountMismatch(TgaError):
    code = "RUN_COUNT_MISMATCH"
    meaning = (
        "A worker counts otherwise than the journal: the try of an operation, the operations inside one or in the "
        "whole run, or the addresses that the run awaits."
    )
    remedy = (
        "Nothing was stored. Read the journal from the last entry that the worker has seen, and count as it does: "
        "tries from 1 at each address, operations that have ended directly inside, of the run those of its own scope."
    )


class RunAnswerUnasked(TgaError):
    code = "RUN_ANSWER_UNASKED"
    meaning = "An answer names an operation of the run that has not begun, has ended, or has begun anew since."
    remedy = "Read the run again; if its question is still open, answer that one."


class RunBlobMissing(TgaError):
    code = "RUN_BLOB_MISSING"
    meaning = "An entry of the run refers to a blob that is not stored, or not with this size."
    remedy = "Upload it with PUT /v1/blobs/{sha256}, then put the entry again."


class ScheduleNotFound(TgaError):
    code = "SCHEDULE_NOT_FOUND"
    meaning = "There is no schedule of this name that the caller may see."
    remedy = "`GET /v1/schedules`, or `tga schedules list`, lists what there is."


class ScheduleLimitReached(TgaError):
    code = "SCHEDULE_LIMIT_REACHED"
    meaning = "The tenant has as many schedules as it can have."
    remedy = "Remove one that is not needed."


class StartDenied(TgaError):
    code = "RUN_START_DENIED"
    meaning = "The policy does not let this principal start this procedure. Nothing was stored."
    remedy = 'Have the policy permit Action::"start"; `tga policy explain-start` says which rule decides.'


class SubmissionDenied(TgaError):
    code = "PROCEDURE_SUBMIT_DENIED"
    meaning = "The policy does not let this principal submit a program for this procedure. Nothing was stored."
    remedy = 'Have the policy permit Action::"submit" (docs/policy.md); start a program that is there already.'


class ProcedureSourceInvalid(TgaError):
    """`line`: of the source, where one line is to blame."""

    code = "PROCEDURE_SOURCE_INVALID"
    meaning = "The submitted source is no program that can run here. Nothing was stored."
    remedy = "Mend the source at that line, and submit it again; `tga lint FILE.lua` reads it without sending it."

    def __init__(
        self,
        what: str,
        *,
        line: int | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what, expected=expected, found=found, remedy=remedy)
        self.line = line


class LuaUnavailable(TgaError):
    code = "LUA_UNAVAILABLE"
    meaning = "This gateway does not execute Lua procedures."
    remedy = "Set enabled = true in [lua] of tga.toml and start the gateway again; `tga doctor` says what is missing."


class ProcedureNotFound(TgaError):
    code = "PROCEDURE_NOT_FOUND"
    meaning = "Nobody has registered a procedure of this name, or not this version or program of it."
    remedy = "Start a worker that has it, which registers it; `tga procedures` lists what there is."


class ProcedureLimitReached(TgaError):
    code = "PROCEDURE_LIMIT_REACHED"
    meaning = "The tenant has as many procedures, or the procedure as many programs, as there can be."
    remedy = "Use fewer names: a changed program is a new version of its procedure, not a new procedure."


class RunNotFound(TgaError):
    code = "RUN_NOT_FOUND"
    meaning = "There is no run with this id, or it is not for this principal to see."
    remedy = "Check the id with `tga runs`."


class RunLeaseLost(TgaError):
    code = "RUN_LEASE_LOST"
    meaning = "The worker's lease on the run is over: another attempt has begun, or the run has ended."
    remedy = "Stop the run here. What this attempt has recorded stays recorded."


class RunErased(TgaError):
    code = "RUN_ERASED"
    meaning = "The payloads of this run were erased. Its entries and their digests stand."
    remedy = "Nothing of it can be read any more; `tga verify` shows that nothing else is missing."


class RunIdTaken(TgaError):
    code = "RUN_ID_TAKEN"
    meaning = "A run with this id exists, and was started with another procedure or another input."
    remedy = "Choose another id, or start it with the same procedure and input: then the run that exists is answered."


class SignalIdReused(TgaError):
    code = "RUN_SIGNAL_ID_REUSED"
    meaning = "The run has a signal with this id already, of another name or with another value."
    remedy = "Use a new `signal_id` for a new signal; repeat one only with its own name and value. Nothing was stored."


class RunTooDeep(TgaError):
    code = "RUN_TOO_DEEP"
    meaning = "A run would start a child below more runs than are admitted, as a program does that starts itself."
    remedy = "Let the program end, or have it do the work in one run; runs that it has started can be cancelled."


class RunTooManyChildren(TgaError):
    code = "RUN_TOO_MANY_CHILDREN"
    meaning = "A run would start a child, and as many runs as are admitted are open below it, or below a run above it."
    remedy = "Start fewer at the same time, or cancel some; those that failed are open until they are cancelled."


class RunEnded(TgaError):
    code = "RUN_ENDED"
    meaning = "The run has ended, or is not in a state in which this can be done."
    remedy = "Look at the run with `tga run show ID`: its state says what can be done."


class RunAnswerInvalid(TgaError):
    code = "RUN_ANSWER_INVALID"
    meaning = "The answer does not fit what the run has asked for. The question stays open."
    remedy = "Answer in the form that `expected` says."


class RunCallbackRefused(TgaError):
    code = "RUN_CALLBACK_REFUSED"
    meaning = "A question of a run names a callback URL whose host this gateway does not call. Nothing was asked."
    remedy = "Have the operator name the host under [callbacks] in tga.toml, or use a webhook by its name."


class RunValueTooLarge(TgaError):
    code = "RUN_VALUE_TOO_LARGE"
    meaning = "A value is too large to stand in the journal."
    remedy = "Store it with PUT /v1/blobs/{sha256} and refer to it (tier artifact)."


class RunTierInvalid(TgaError):
    code = "RUN_TIER_INVALID"
    meaning = "A value's tier and its resume do not go together: what a replay skips must be recorded."
    remedy = "A transient value is recomputed: `resume: recompute`."


class VerificationNotFound(TgaError):
    code = "VERIFICATION_NOT_FOUND"
    meaning = "The tenant has no such verification of the log; only its last twenty are kept."
    remedy = "List those that are kept: GET /v1/log/verifications."


class BlobNotFound(TgaError):
    code = "BLOB_NOT_FOUND"
    meaning = "The tenant has no blob with this digest; it may have been collected because no entry referred to it."
    remedy = "Check the digest, 64 lowercase hex digits; upload the bytes with PUT /v1/blobs/{sha256}."


class BlobMismatch(TgaError):
    code = "BLOB_MISMATCH"
    meaning = "The bytes that were sent do not hash to the digest under which they were to be stored."
    remedy = "Nothing was stored. Send the bytes again as they are, under their own SHA-256."


class BlobDamaged(TgaError):
    code = "BLOB_DAMAGED"
    meaning = "What the object store holds is not what the blob's digest says; nothing of it was served."
    remedy = "Restore the object from a backup of the object store, and find out who changed it."


class BlobGoing(TgaError):
    code = "BLOB_GOING"
    meaning = "The blob was unused for long and is being deleted this moment; the upload comes too early."
    remedy = "Send the same upload again."


class BlobStoreUnavailable(TgaError):
    code = "BLOB_STORE_UNAVAILABLE"
    meaning = "The object store for blobs does not answer, or refuses the gateway."
    remedy = "Check that it can be reached, and [blobs] url and the credentials in the gateway's environment."


ALL_ERRORS: tuple[type[TgaError], ...] = (
    InvalidTransition,
    SequenceGap,
    ChecksumMismatch,
    CheckpointMissing,
    RecoveryFailed,
    LockAcquireFailed,
    ConcurrentExecution,
    InputMalformed,
    InputTooLarge,
    SchemaViolation,
    TraceNotFound,
    KeyClaimed,
    KeyReused,
    KeyMissing,
    KeyReserved,
    CallInFlight,
    ToolNotFound,
    ArgumentsInvalid,
    TraceNotHeld,
    StoreBusy,
    StoreUnavailable,
    OutcomeUnknown,
    StoreUnfit,
    MigrationRefused,
    EmbeddedPostgresFailed,
    BackupFailed,
    SettingInvalid,
    Unauthenticated,
    Forbidden,
    IssuerUnavailable,
    SignInExpired,
    SignInRefused,
    CallDenied,
    AlreadyDecided,
    RequestMismatch,
    ApprovalExpired,
    ApprovalNotExpired,
    SignatureInvalid,
    ToolQuarantined,
    SecretMissing,
    TraceErased,
    StreamInUse,
    TraceUnfinished,
    RunUnfinished,
    RateLimited,
    TooManyInFlight,
    GatewayBusy,
    ShuttingDown,
    RouteNotFound,
    MethodNotAllowed,
    HeadersTooLarge,
    RequestTimeout,
    InternalError,
    AccessNotFound,
    PolicyInvalid,
    GatewayUnreachable,
    NoteInvalid,
    ProofInvalid,
    NotYetLogged,
    VerificationUnfinished,
    EntryUnlogged,
    LogForked,
    BundleInvalid,
    RunPositionTaken,
    RunPositionGap,
    RunCountMismatch,
    RunAnswerUnasked,
    RunBlobMissing,
    SubmissionDenied,
    ProcedureSourceInvalid,
    LuaUnavailable,
    ProcedureNotFound,
    ProcedureLimitReached,
    ScheduleNotFound,
    ScheduleLimitReached,
    StartDenied,
    RunNotFound,
    RunLeaseLost,
    RunErased,
    RunIdTaken,
    SignalIdReused,
    RunTooDeep,
    RunTooManyChildren,
    RunEnded,
    RunAnswerInvalid,
    RunCallbackRefused,
    RunValueTooLarge,
    RunTierInvalid,
    VerificationNotFound,
    BlobNotFound,
    BlobMismatch,
    BlobDamaged,
    BlobGoing,
    BlobStoreUnavailable,
)
BY_CODE: dict[str, type[TgaError]] = {error.code: error for error in ALL_ERRORS}
