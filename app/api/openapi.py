"""The OpenAPI document: what the framework knows of the routes, and what it cannot know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from app import __version__
from app.api.contracts import load_contracts, recorded
from app.api.documents import Shape
from app.core import errors
from app.domain.addresses import OWN_RUN_ID_PATTERN
from app.edge.problems import PROBLEM_SCHEMA, documented

TITLE: Final = "TGA Gateway"
DESCRIPTION: Final = (
    "A gateway between AI agents and their tools: every call is decided, dispatched once per idempotency key, and "
    "recorded on a hash-chained log. JSON is read strictly: UTF-8, unique keys, integers within 2^53 - 1, known "
    "fields only. Every error is a problem document (RFC 9457) whose `code` is stable; `/errors` explains each."
)

_PUBLIC: Final = {"/v1/keys/signing"}

# The nouns of the API, in the order in which a reader needs them.
NOUNS: Final = {
    "tool calls": "What agents do: call a tool, once per idempotency key.",
    "approvals": "What waits for a person.",
    "traces": "One trace a call: what was asked for, decided, sent and answered, and what people do about it.",
    "tools": "The registered tool servers and their tools, with their pins.",
    "policy": "The rules that decide, and why they do.",
    "procedures": "Programs that runs can be started of.",
    "runs": "Durable programs: start them, look at them, answer what they ask, end them, have them go on.",
    "schedules": "What starts runs by itself: times, and events.",
    "worker": "The worker protocol: how a program in any language executes runs (docs/worker-protocol.md).",
    "blobs": "Large values of runs, by their SHA-256.",
    "events": "What happens, as it happens, as server-sent events.",
    "log": "The verifiable log: signed tree heads, and proofs that an entry is in it.",
    "keys": "Who is calling, and who may; and the public keys that signatures of this gateway are checked with.",
    "health": "For whoever runs the gateway.",
}

_TRACE: Final = "0197c2a4-5f0e-7c3a-9d54-3a1f0b8e2c11"
_TOOL_CALL: Final = "0197c2a4-5f10-7e1b-8a40-6c2d9e7f5b22"
_DIGEST: Final = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 128}
_IN_PATH: Final = {
    "trace_id": {"type": "string", "format": "uuid", "description": "UUIDv7"},
    "run_id": {"type": "string", "pattern": OWN_RUN_ID_PATTERN},
}
_DECISION: Final[dict[str, Any]] = {
    "type": ["object", "null"],
    "properties": {
        "decision": {"enum": ["APPROVE", "DENY"]},
        "decided_by": {
            "type": "object",
            "properties": {
                "type": {"enum": ["policy", "person", "expiry", "withdrawal"]},
                "id": {"type": "string"},
            },
        },
        "rationale": {"type": ["string", "null"]},
        "policy_ids": {"type": "array", "items": {"type": "string"}},
    },
}
_EFFECT_EXAMPLE: Final[dict[str, Any]] = {
    "attempts": [
        {
            "attempt": 1,
            "ended_at": "2025-07-01T12:00:00.042Z",
            "result": "answered",
            "started_at": "2025-07-01T12:00:00.017Z",
        }
    ],
    "basis": "answer",
    "error": None,
    "outcome": "SUCCESS",
    "output": {"encoding": "json", "value": {"charged": 1200}},
    "recorded_at": "2025-07-01T12:00:00.043Z",
    "resolution": None,
    "schema_id": "tga/v1/tool_effect",
    "schema_version": "1.0",
    "tool_call_digest": "5f" * 32,
    "tool_call_id": _TOOL_CALL,
    "trace_id": _TRACE,
}
_ACCEPTED: Final[dict[str, Any]] = {
    "description": "Durable, and not finished: it waits for a person, or is being executed.",
    "headers": {
        "Location": {"schema": {"type": "string"}, "description": "Where the trace is."},
        "Retry-After": {"schema": {"type": "string"}, "description": "After how many seconds to look again."},
    },
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/Accepted"},
            "example": {"trace_id": _TRACE, "state": "PENDING", "waiting": "supervisor"},
        }
    },
}
MOVED: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The trace rests: finished, denied, or waiting for a person again.",
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/Moved"},
                # By reference: the framework leaves nulls out of what it is given.
                "examples": {"denied": {"$ref": "#/components/examples/Denied"}},
            }
        },
    },
    202: _ACCEPTED,
}
PIN_STATE: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "What is pinned now.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "server_id": {"type": "string"},
                        "tool_name": {"type": "string"},
                        "status": {"enum": ["pinned", "quarantined"]},
                        "pinned_digest": {"anyOf": [_DIGEST, {"type": "null"}]},
                        "found_digest": _DIGEST,
                        "since": {"type": ["string", "null"]},
                    },
                },
                "example": {
                    "server_id": "pay",
                    "tool_name": "charge",
                    "status": "pinned",
                    "pinned_digest": "ab" * 32,
                    "found_digest": "ab" * 32,
                    "since": "2025-07-01T12:00:00.000Z",
                },
            }
        },
    }
}
DECISION_EXAMPLE: Final = {"decision": "APPROVE", "action_request_digest": "9c" * 32, "rationale": "checked with sales"}

EXAMPLES: Final[dict[str, Any]] = {
    "Denied": {
        "summary": "A person denied it",
        "value": {
            "trace_id": _TRACE,
            "state": "DENIED",
            "waiting": None,
            "tool_call_id": None,
            "decision": {
                "decision": "DENY",
                "decided_by": {"type": "person", "id": "ada"},
                "rationale": "not today",
                "policy_ids": [],
            },
            "tool_effect": None,
        },
    }
}
SCHEMAS: Final[dict[str, Any]] = {
    "Problem": PROBLEM_SCHEMA,
    "Accepted": {
        "type": "object",
        "required": ["trace_id", "state", "waiting"],
        "properties": {
            "trace_id": {"type": "string"},
            "state": {"type": "string"},
            "waiting": {"enum": ["supervisor", "operator", None]},
        },
    },
    "Moved": {
        "type": "object",
        "required": ["trace_id", "state", "waiting", "tool_call_id", "decision", "tool_effect"],
        "properties": {
            "trace_id": {"type": "string"},
            "state": {"type": "string"},
            "waiting": {"enum": ["supervisor", "operator", None]},
            "tool_call_id": {"type": ["string", "null"]},
            "decision": _DECISION,
            "tool_effect": recorded("tool_effect", may_be_missing=True),
        },
    },
    "ToolCallAnswer": {
        "type": "object",
        "required": ["trace_id", "tool_call_id", "state", "replayed", "tool_effect"],
        "properties": {
            "trace_id": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "state": {"enum": ["COMPLETED", "FAILED"]},
            "replayed": {"type": "boolean", "description": "Answered from the record: this request executed nothing."},
            "tool_effect": recorded("tool_effect"),
        },
    },
}
# Fields that hold recorded documents: the framework refuses to refer to what it did not make.
_RECORDED: Final[dict[tuple[str, str], dict[str, Any]]] = {
    **{
        ("TraceArtifacts", name): recorded(name, may_be_missing=True)
        for name in ("action_request", "supervisor_decision", "tool_call", "tool_effect")
    },
    ("EntryItem", "entry"): recorded("execution_log_entry"),
    ("RunEntryItem", "entry"): recorded("run_log_entry"),
}
_CALL_ERRORS: Final = (
    errors.SchemaViolation,
    errors.KeyMissing,
    errors.ToolNotFound,
    errors.ArgumentsInvalid,
    errors.KeyReused,
    errors.KeyReserved,
    errors.CallDenied,
    errors.CallInFlight,
    errors.ConcurrentExecution,
    errors.ToolQuarantined,
    errors.ChecksumMismatch,
    errors.SequenceGap,
    errors.InvalidTransition,
    errors.RecoveryFailed,
    errors.SecretMissing,
    errors.TraceErased,
    errors.RequestTimeout,
    errors.LockAcquireFailed,
    errors.StoreBusy,
    errors.OutcomeUnknown,
)


def request_body(model: type[BaseModel], example: Any, *, in_path: Sequence[str] = ()) -> dict[str, Any]:
    """For `openapi_extra`: the body and the parts of the path that the route reads by itself."""
    schema = model.model_json_schema()
    # What refers within the model would refer within the whole document.
    parts = schema.pop("$defs", {})
    schema = _inlined(schema, parts)
    body = {
        "requestBody": {
            "required": bool(schema.get("required")),
            "content": {"application/json": {"schema": schema, "example": example}},
        }
    }
    named = [{"name": name, "in": "path", "required": True, "schema": _IN_PATH.get(name, _NAME)} for name in in_path]
    return {**body, "parameters": named} if named else body


def _inlined(value: Any, parts: dict[str, Any]) -> Any:
    """With each part in the place of what refers to it."""
    if isinstance(value, list):
        return [_inlined(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        beside = {key: item for key, item in value.items() if key != "$ref"}
        value = {**parts[reference.removeprefix("#/$defs/")], **beside}
    return {key: _inlined(item, parts) for key, item in value.items()}


def tool_call_operation(body: type[BaseModel]) -> dict[str, Any]:
    """The hot route, which the framework does not see."""
    example = {
        "server_id": "pay",
        "tool_name": "charge",
        "arguments": {"amount": 1200},
        "idempotency_key": "order-4711",
        "intent": "charge the customer for order 4711",
    }
    answer = {
        "trace_id": _TRACE,
        "tool_call_id": _TOOL_CALL,
        "state": "COMPLETED",
        "replayed": False,
        "tool_effect": _EFFECT_EXAMPLE,
    }
    return {
        "summary": "Call a tool, once per idempotency key",
        "operationId": "call_tool",
        "tags": ["tool calls"],
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "Instead of `idempotency_key` in the body; if both are there they must be equal.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
            },
            {
                "name": "traceparent",
                "in": "header",
                "required": False,
                "description": "W3C Trace Context, passed on to the tool server. Ignored unless it is version 00.",
                "schema": {"type": "string"},
            },
        ],
        **request_body(body, example),
        "responses": {
            "200": {
                "description": "Finished: the recorded effect.",
                "headers": {
                    "Idempotent-Replayed": {
                        "schema": {"type": "string", "enum": ["true"]},
                        "description": "There when the answer is from the record.",
                    }
                },
                "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/ToolCallAnswer"}, "example": answer}
                },
            },
            "202": _ACCEPTED,
            **{str(status): response for status, response in documented(*_CALL_ERRORS).items()},
        },
    }


def document_of(app: FastAPI, unseen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole document; `unseen` are paths that the framework does not know."""
    document = get_openapi(
        title=TITLE, version=__version__, description=DESCRIPTION, routes=app.routes, openapi_version="3.1.0"
    )
    document["paths"] = dict(sorted({**document.get("paths", {}), **unseen}.items(), key=_place))
    document["tags"] = [{"name": name, "description": about} for name, about in NOUNS.items()]
    components = document.setdefault("components", {})
    components["schemas"] = dict(sorted({**components.get("schemas", {}), **SCHEMAS, **load_contracts()}.items()))
    for (shape, field), schema in _RECORDED.items():
        told = components["schemas"][shape]["properties"][field]
        components["schemas"][shape]["properties"][field] = {
            **schema,
            **{key: told[key] for key in ("title", "description") if key in told},
        }
    for name, example in _examples_of(Shape):
        # Put back as it was: the framework leaves nulls out, and then the example does not fit its own schema.
        if name in components["schemas"]:
            components["schemas"][name]["example"] = example
    components["examples"] = EXAMPLES
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of a configured issuer."}
    }
    document["security"] = [{"bearer": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if not path.startswith("/v1/") or path in _PUBLIC:
                operation["security"] = []
            answer = operation["responses"].get("200", {})
            if answer.get("description") == "Successful Response":  # the framework's, which says nothing
                answer["description"] = "What was asked for."
    return document


def _place(path: tuple[str, dict[str, Any]]) -> tuple[int, str]:
    """By noun, in the order of NOUNS; within a noun what is read comes before what is done to it, by path."""
    (tag,) = {operation["tags"][0] for operation in path[1].values()}
    return list(NOUNS).index(tag), path[0]


def _examples_of(shape: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for model in shape.__subclasses__():
        extra = model.model_config.get("json_schema_extra")
        if isinstance(extra, dict) and "example" in extra:
            yield model.__name__, extra["example"]
        yield from _examples_of(model)
