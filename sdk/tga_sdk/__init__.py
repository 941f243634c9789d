"""The Python SDK of TGA Gateway: durable programs, flows and agents in plain Python, and tool calls that happen once.

Everything that users import stands here: `from tga_sdk import Client, procedure, Worker`. A name is loaded when it is
first used, so that a program that only calls tools loads neither workers nor agents. The SDK never imports `app`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

# To export a name add it to the table and, for type checkers, to the imports below it; a test holds the two equal.
_EXPORTS: Final[dict[str, tuple[str, ...]]] = {
    "agents": ("AgentSession", "AgentSpecification", "DurableAgent", "durable"),
    "client": (
        "Approval",
        "AsyncClient",
        "Client",
        "Entry",
        "Moved",
        "Result",
        "Run",
        "RunItem",
        "RunState",
        "Tool",
        "Trace",
        "TraceItem",
        "Triggered",
    ),
    "keys": ("key_for",),
    "errors": (
        "AnswerInvalid",
        "ApprovalPending",
        "ArgumentsInvalid",
        "Busy",
        "CallFailed",
        "CallHeld",
        "ChildError",
        "Denied",
        "ExtraMissing",
        "Forbidden",
        "GatewayError",
        "GatewayUnreachable",
        "Interrupted",
        "KeyReused",
        "KeyUnstable",
        "ModelRefused",
        "NotDeterministic",
        "NotFound",
        "OperationError",
        "OutcomeUnknown",
        "PredictionFailed",
        "PredictionTimedOut",
        "ProcedureInvalid",
        "RateLimited",
        "RunFailed",
        "RunIdTaken",
        "RunUnfinished",
        "SettingInvalid",
        "StepError",
        "Stop",
        "TgaError",
        "TierInvalid",
        "TimedOut",
        "ToolError",
        "ToolNotFound",
        "ToolQuarantined",
        "Unauthorized",
        "Unfinished",
        "ValueInvalid",
        "ValueNotSerializable",
    ),
    "context": ("Context", "Escalation", "Review"),
    "flows": ("DeleteOnSuccess", "Event", "Flow", "Keep", "Schedule", "Step", "agent", "call_tool", "llm"),
    "models": ("Predictor",),
    "procedures": ("Procedure", "Task", "procedure", "task"),
    "retry": ("Retry",),
    "serving": ("serving",),
    "sync_context": ("SyncContext",),
    "worker": ("Worker",),
    "wrappers": ("Artifact", "Secret"),
}

if TYPE_CHECKING:
    from tga_sdk.agents import AgentSession as AgentSession
    from tga_sdk.agents import AgentSpecification as AgentSpecification
    from tga_sdk.agents import DurableAgent as DurableAgent
    from tga_sdk.agents import durable as durable
    from tga_sdk.client import Approval as Approval
    from tga_sdk.client import AsyncClient as AsyncClient
    from tga_sdk.client import Client as Client
    from tga_sdk.client import Entry as Entry
    from tga_sdk.client import Moved as Moved
    from tga_sdk.client import Result as Result
    from tga_sdk.client import Run as Run
    from tga_sdk.client import RunItem as RunItem
    from tga_sdk.client import RunState as RunState
    from tga_sdk.client import Tool as Tool
    from tga_sdk.client import Trace as Trace
    from tga_sdk.client import TraceItem as TraceItem
    from tga_sdk.client import Triggered as Triggered
    from tga_sdk.context import Context as Context
    from tga_sdk.context import Escalation as Escalation
    from tga_sdk.context import Review as Review
    from tga_sdk.errors import AnswerInvalid as AnswerInvalid
    from tga_sdk.errors import ApprovalPending as ApprovalPending
    from tga_sdk.errors import ArgumentsInvalid as ArgumentsInvalid
    from tga_sdk.errors import Busy as Busy
    from tga_sdk.errors import CallFailed as CallFailed
    from tga_sdk.errors import CallHeld as CallHeld
    from tga_sdk.errors import ChildError as ChildError
    from tga_sdk.errors import Denied as Denied
    from tga_sdk.errors import ExtraMissing as ExtraMissing
    from tga_sdk.errors import Forbidden as Forbidden
    from tga_sdk.errors import GatewayError as GatewayError
    from tga_sdk.errors import GatewayUnreachable as GatewayUnreachable
    from tga_sdk.errors import Interrupted as Interrupted
    from tga_sdk.errors import KeyReused as KeyReused
    from tga_sdk.errors import KeyUnstable as KeyUnstable
    from tga_sdk.errors import ModelRefused as ModelRefused
    from tga_sdk.errors import NotDeterministic as NotDeterministic
    from tga_sdk.errors import NotFound as NotFound
    from tga_sdk.errors import OperationError as OperationError
    from tga_sdk.errors import OutcomeUnknown as OutcomeUnknown
    from tga_sdk.errors import PredictionFailed as PredictionFailed
    from tga_sdk.errors import PredictionTimedOut as PredictionTimedOut
    from tga_sdk.errors import ProcedureInvalid as ProcedureInvalid
    from tga_sdk.errors import RateLimited as RateLimited
    from tga_sdk.errors import RunFailed as RunFailed
    from tga_sdk.errors import RunIdTaken as RunIdTaken
    from tga_sdk.errors import RunUnfinished as RunUnfinished
    from tga_sdk.errors import SettingInvalid as SettingInvalid
    from tga_sdk.errors import StepError as StepError
    from tga_sdk.errors import Stop as Stop
    from tga_sdk.errors import TgaError as TgaError
    from tga_sdk.errors import TierInvalid as TierInvalid
    from tga_sdk.errors import TimedOut as TimedOut
    from tga_sdk.errors import ToolError as ToolError
    from tga_sdk.errors import ToolNotFound as ToolNotFound
    from tga_sdk.errors import ToolQuarantined as ToolQuarantined
    from tga_sdk.errors import Unauthorized as Unauthorized
    from tga_sdk.errors import Unfinished as Unfinished
    from tga_sdk.errors import ValueInvalid as ValueInvalid
    from tga_sdk.errors import ValueNotSerializable as ValueNotSerializable
    from tga_sdk.flows import DeleteOnSuccess as DeleteOnSuccess
    from tga_sdk.flows import Event as Event
    from tga_sdk.flows import Flow as Flow
    from tga_sdk.flows import Keep as Keep
    from tga_sdk.flows import Schedule as Schedule
    from tga_sdk.flows import Step as Step
    from tga_sdk.flows import agent as agent
    from tga_sdk.flows import call_tool as call_tool
    from tga_sdk.flows import llm as llm
    from tga_sdk.keys import key_for as key_for
    from tga_sdk.models import Predictor as Predictor
    from tga_sdk.procedures import Procedure as Procedure
    from tga_sdk.procedures import Task as Task
    from tga_sdk.procedures import procedure as procedure
    from tga_sdk.procedures import task as task
    from tga_sdk.retry import Retry as Retry
    from tga_sdk.serving import serving as serving
    from tga_sdk.sync_context import SyncContext as SyncContext
    from tga_sdk.worker import Worker as Worker
    from tga_sdk.wrappers import Artifact as Artifact
    from tga_sdk.wrappers import Secret as Secret

_MODULE_OF: Final = {name: f"tga_sdk.{module}" for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tga_sdk' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
