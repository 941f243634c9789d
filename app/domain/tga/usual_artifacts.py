"""Read the artifacts of usual traces at once, for callers that read many: a tenth of what their models take.

An artifact is accepted if its bytes are a skeleton of literal text (the names of its fields, in the order of RFC 8785)
with members in between, each of which is matched by a pattern, or is canonical JSON by itself (arguments, an answer).
So whatever is accepted is a document in canonical form that its model accepts; tests compare the two over changed
bytes. None says nothing: what is rare (a person's decision, a resolution, names that JSON escapes) or wrong is for the
model to judge, in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

from app.core.canonical import is_canonical_value, read_canonical
from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    DEPTH_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    KEYS_MAX,
    NAME_CHARS_MAX,
    RUN_PATH_CHARS_MAX,
    TEXT_CHARS_MAX,
)
from app.domain.addresses import PATH_PATTERN
from app.domain.identity import ROLES
from app.domain.ledger.documents import TIME_PATTERN, UUID7_PATTERN
from app.domain.tga.documents import ActionRequest
from app.domain.tga.transitions import ArtifactType, State
from app.domain.tools import OnUnknownOutcome, ToolClass


def _no_groups(pattern: str) -> str:
    """The pattern of a whole text, inside another one: only the members that are compared are groups."""
    return pattern.removeprefix("^").removesuffix("$").replace("(", "(?:").replace("(?:?:", "(?:")


# Printable ASCII that JSON writes as it is; with a space where a text may have one.
_PLAIN: Final = r"[!#-\[\]-~]"
_SPACED: Final = r"[ !#-\[\]-~]"
_NAME: Final = rf"{_PLAIN}{{1,{NAME_CHARS_MAX}}}"
_KEY: Final = rf"{_PLAIN}(?:{_SPACED}{{0,{IDEMPOTENCY_KEY_CHARS_MAX - 2}}}{_PLAIN})?"
_TEXT: Final = rf"{_SPACED}{{0,{TEXT_CHARS_MAX}}}"
_SHA256: Final = "[0-9a-f]{64}"
_TIME: Final = _no_groups(TIME_PATTERN)
_CLASS: Final = "|".join(get_args(ToolClass))
_ROLE: Final = rf'"(?:{"|".join(ROLES)})"'
_ROLES: Final = rf"\[(?:{_ROLE}(?:,{_ROLE}){{0,{len(ROLES) - 1}}})?\]"
_ATTEMPT: Final = (
    rf'\{{"attempt":[1-9][0-9]?,"ended_at":(?:"{_TIME}"|null),"result":"(?:answered|retryable_answer|timed_out|'
    rf'disconnected|refused|interrupted)","started_at":"{_TIME}"\}}'
)
# The operation of a run that makes the call; its attempt is below RUN_ENTRIES_MAX.
_RUN: Final = ",".join(
    (
        r'"attempt":[1-9][0-9]{0,5}',
        rf'"path":"(?=[^"]{{1,{RUN_PATH_CHARS_MAX}}}"){_no_groups(PATH_PATTERN)}"',
        rf'"procedure":"{_NAME}"',
        r'"run_id":"(?:[!#-.0-\[\]-~]{1,128}/)?[A-Za-z0-9][A-Za-z0-9._:-]{0,95}"',
        rf'"version":"{_NAME}"',
        rf'"worker":"{_NAME}"',
    )
)


def _or_null(pattern: str) -> str:
    return rf'(?:"{pattern}"|null)'


def _compiled(*members: str) -> re.Pattern[bytes]:
    return re.compile(",".join(members).encode("ascii"))


ARGUMENTS: Final = b'{"arguments":'
AFTER_REQUESTED: Final = b',"expires_at":'
_AFTER_CALLED: Final = b',"idempotency_key":'
ANSWER: Final = b',"output":{"encoding":"json","value":'
AFTER_ANSWER: Final = b'},"recorded_at":"'

REQUEST: Final = _compiled(
    rf',"expires_at":(?:"(?P<expires_at>{_TIME})"|null)',
    rf'"idempotency_key":(?:"(?P<key>{_KEY})"|null)',
    rf'"intent":{_or_null(_TEXT)}',
    rf'"principal":\{{"principal_id":"(?P<principal_id>{_NAME})"(?:,"roles":{_ROLES})?,'
    rf'"tenant":"(?P<tenant>{_NAME})"\}}',
    rf'"requested_at":"{_TIME}"(?:,"run":\{{{_RUN}\}})?',
    r'"schema_id":"tga/v1/action_request","schema_version":"1\.0"',
    rf'"server_id":"(?P<server_id>{_NAME})"',
    rf'"tool_class":"(?P<tool_class>{_CLASS})"',
    rf'"tool_definition_digest":{_or_null(_SHA256)}',
    rf'"tool_name":"(?P<tool_name>{_NAME})"',
    rf'"trace_id":"(?P<trace_id>{UUID7_PATTERN})"(?:,"traceparent":"00-[0-9a-f]{{32}}-[0-9a-f]{{16}}-[0-9a-f]{{2}}")?\}}',
)
DECISION: Final = _compiled(
    rf'\{{"action_request_digest":"(?P<bound>{_SHA256})"',
    rf'"decided_at":"{_TIME}"',
    rf'"decided_by":\{{"id":"{_NAME}","type":"policy"\}}',
    r'"decision":"(?P<verdict>APPROVE|DENY)"',
    rf'"policy_digest":{_or_null(_SHA256)}',
    rf'"policy_ids":\[(?:"{_NAME}"(?:,"{_NAME}"){{0,63}})?\]',
    rf'"rationale":{_or_null(_TEXT)}',
    r'"schema_id":"tga/v1/supervisor_decision","schema_version":"1\.0"',
    r'"signature":null',
    rf'"trace_id":"(?P<trace_id>{UUID7_PATTERN})"\}}',
)
CALL: Final = _compiled(
    rf',"idempotency_key":(?:"(?P<key>{_KEY})"|null)',
    rf'"on_unknown_outcome":"(?P<on_unknown>{"|".join(get_args(OnUnknownOutcome))})"',
    rf'"prepared_at":"{_TIME}"',
    rf'"reconcile_tool":(?:"(?P<reconcile_tool>{_NAME})"|null)',
    r'"schema_id":"tga/v1/tool_call","schema_version":"1\.0"',
    rf'"server_id":"(?P<server_id>{_NAME})"',
    rf'"supervisor_decision_digest":"(?P<bound>{_SHA256})"',
    rf'"tool_call_id":"(?P<tool_call_id>{UUID7_PATTERN})"',
    rf'"tool_class":"(?P<tool_class>{_CLASS})"',
    rf'"tool_definition_digest":{_or_null(_SHA256)}',
    rf'"tool_name":"(?P<tool_name>{_NAME})"',
    rf'"trace_id":"(?P<trace_id>{UUID7_PATTERN})"\}}',
)
EFFECT: Final = _compiled(
    rf'\{{"attempts":(?P<attempts>\[(?:{_ATTEMPT}(?:,{_ATTEMPT}){{0,98}})?\])',
    r'"basis":"answer"',
    rf'"error":(?:(?P<no_error>null)|\{{"code":"{_NAME}","message":"{_TEXT}"\}})',
    r'"outcome":"(?P<outcome>SUCCESS|FAILURE)"',
)
EFFECT_END: Final = _compiled(
    rf'"recorded_at":"{_TIME}"',
    r'"resolution":null',
    r'"schema_id":"tga/v1/tool_effect","schema_version":"1\.0"',
    rf'"tool_call_digest":"(?P<bound>{_SHA256})"',
    rf'"tool_call_id":"(?P<tool_call_id>{UUID7_PATTERN})"',
    rf'"trace_id":"(?P<trace_id>{UUID7_PATTERN})"\}}',
)
NO_ANSWER: Final = b',"output":null,'


class Asked(NamedTuple):
    """What an action_request says, as far as that which stands beside its trace is compared with it."""

    trace_id: str
    tenant: str
    principal_id: str
    expires_at: str | None
    server_id: str
    tool_name: str
    idempotency_key: str | None
    payload_digest: Digest
    arguments: dict[str, Any]

    @classmethod
    def of(cls, request: ActionRequest) -> Asked:
        return cls(
            request.trace_id,
            request.principal.tenant,
            request.principal.principal_id,
            request.expires_at,
            request.server_id,
            request.tool_name,
            request.idempotency_key,
            request.payload_digest,
            request.arguments,
        )


class UsualArtifact(NamedTuple):
    """An artifact that was read at once: what it is, where it leads, and what the folded state keeps of it."""

    artifact_type: ArtifactType
    to_state: State
    trace_id: str
    in_state: dict[str, Any]
    asked: Asked | None = None
    attempts: int = 0  # that an effect lists


def read_usual(head: Head, folded: Mapping[str, Any] | None, raw: bytes, digest: Digest) -> UsualArtifact | None:
    """The artifact that is due after `head` in a trace that folds to these fields: bound to the artifact before it, and
    about the same call (I3). Its entry is still to be compared. `digest` is of these bytes."""
    if head.sequence_number == 0:
        return _read_request(raw, digest)
    if folded is None or head.artifact_digest is None or not is_bounded(raw):
        return None
    bound = head.artifact_digest.encode("ascii")
    if head.state == "PENDING":
        return _read_decision(raw, digest, bound)
    if head.state == "AUTHORIZED":
        return _read_call(raw, digest, bound, folded)
    return _read_effect(raw, digest, bound, folded) if head.state == "EXECUTING" else None


def _read_request(raw: bytes, digest: Digest) -> UsualArtifact | None:
    """What a caller or a run asked for."""
    split = raw.rfind(AFTER_REQUESTED)
    said = REQUEST.fullmatch(raw, split) if split > 0 and is_bounded(raw) and raw.startswith(ARGUMENTS) else None
    arguments = None if said is None else read_canonical(raw[len(ARGUMENTS) : split], bytes_max=ARTIFACT_BYTES_MAX)
    if said is None or arguments is None:
        return None
    expires_at, key, principal_id, tenant, server_id, tool_class, tool_name, trace_id = said.groups()
    if key is None and tool_class == b"write":  # I2
        return None
    asked = Asked(
        trace_id.decode(),
        tenant.decode(),
        principal_id.decode(),
        None if expires_at is None else expires_at.decode(),
        server_id.decode(),
        tool_name.decode(),
        None if key is None else key.decode(),
        payload_digest_in(raw, split, server_id, tool_name),
        arguments,
    )
    in_state = {
        "trace_id": asked.trace_id,
        "server_id": asked.server_id,
        "tool_name": asked.tool_name,
        "tool_class": tool_class.decode(),
        "idempotency_key": asked.idempotency_key,
        "payload_digest": asked.payload_digest,
        "action_request_digest": digest,
        "supervisor_decision_digest": None,
        "tool_call_digest": None,
        "tool_call_id": None,
        "tool_effect_digest": None,
    }
    return UsualArtifact("action_request", "PENDING", asked.trace_id, in_state, asked)


def _read_decision(raw: bytes, digest: Digest, bound: bytes) -> UsualArtifact | None:
    """A decision of the policy, which has no signature."""
    said = DECISION.fullmatch(raw)
    if said is None or said["bound"] != bound:
        return None
    to_state: State = "DENIED" if said["verdict"] == b"DENY" else "AUTHORIZED"
    in_state = {"supervisor_decision_digest": digest}
    return UsualArtifact("supervisor_decision", to_state, said["trace_id"].decode(), in_state)


def _read_call(raw: bytes, digest: Digest, bound: bytes, folded: Mapping[str, Any]) -> UsualArtifact | None:
    """The call that was asked for: its payload has the request's digest, so its arguments are those that were read."""
    split = raw.rfind(_AFTER_CALLED)
    said = CALL.fullmatch(raw, split) if split > 0 and raw.startswith(ARGUMENTS) else None
    if said is None or said["bound"] != bound:
        return None
    key, on_unknown, reconcile_tool, server_id, _, tool_call_id, tool_class, tool_name, trace_id = said.groups()
    asked = (folded["payload_digest"], folded["tool_class"], folded["idempotency_key"])
    if asked != (payload_digest_in(raw, split, server_id, tool_name), tool_class.decode(), key and key.decode()):  # I3
        return None
    if (on_unknown == b"reconcile") != (reconcile_tool is not None):
        return None
    in_state = {"tool_call_digest": digest, "tool_call_id": tool_call_id.decode()}
    return UsualArtifact("tool_call", "EXECUTING", trace_id.decode(), in_state)


def effect_parts(raw: bytes) -> tuple[re.Match[bytes], re.Match[bytes]] | None:
    """What an effect says before the answer and after it, where the answer is a JSON value as it must be written, or
    none."""
    said = EFFECT.match(raw)
    if said is None:
        return None
    begun, end = said.end(), raw.rfind(AFTER_ANSWER)
    if raw.startswith(ANSWER, begun) and end > 0:
        if not is_canonical_value(raw[begun + len(ANSWER) : end]):
            return None
        end += len(b"},")
    elif raw.startswith(NO_ANSWER, begun):
        end = begun + len(NO_ANSWER)
    else:
        return None
    last = EFFECT_END.fullmatch(raw, end)
    return None if last is None else (said, last)


def _read_effect(raw: bytes, digest: Digest, bound: bytes, folded: Mapping[str, Any]) -> UsualArtifact | None:
    """What a tool server answered: a JSON value, or a failure without one."""
    parts = effect_parts(raw)
    if parts is None:
        return None
    said, last = parts
    if last["bound"] != bound or last["tool_call_id"].decode() != folded["tool_call_id"]:  # I3
        return None
    attempts, no_error, outcome = said.groups()
    if (outcome == b"SUCCESS") != (no_error is not None):
        return None
    to_state: State = "FAILED" if no_error is None else "COMPLETED"
    in_state = {"tool_effect_digest": digest}
    listed = attempts.count(b'"attempt":')
    return UsualArtifact("tool_effect", to_state, last["trace_id"].decode(), in_state, attempts=listed)


def is_bounded(raw: bytes) -> bool:
    """No document of so few bytes, brackets and colons is too large, too deep, or has too many keys."""
    if len(raw) > ARTIFACT_BYTES_MAX or raw.count(b"{") + raw.count(b"[") > DEPTH_MAX:
        return False
    return len(raw) < KEYS_MAX or raw.count(b'":') <= KEYS_MAX


def payload_digest_in(raw: bytes, end: int, server_id: bytes, tool_name: bytes) -> Digest:
    """As `payload_digest`, of members that stand in canonical form already."""
    return digest_of_bytes(b'%b,"server_id":"%b","tool_name":"%b"}' % (raw[:end], server_id, tool_name))
