"""Questions that a run asks people: what is asked, how long it waits, whom it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from tga_sdk.durations import verify_order, verify_seconds
from tga_sdk.given import to_json
from tga_sdk.operations import Operations
from tga_sdk.times import time_text
from tga_sdk.values import decode
from tga_sdk.wrappers import Artifact, Secret


class Review(BaseModel):
    """What a person who was asked for a review has said. `edited` is what is to be used instead, where it was given."""

    decision: Literal["approve", "revise", "reject"]
    feedback: str | None = None
    edited: Any = None


@dataclass(frozen=True, slots=True)
class Escalation:
    """No person has answered after so many seconds: these webhooks are told, all if none is named. The question stays
    open, and the list of approvals shows that it has been raised."""

    after: float
    webhooks: Sequence[str] = ()


class Questions(Operations):
    """The part of `ctx` that asks people. A question is an operation like any other: its answer is recorded."""

    async def approve(
        self,
        message: str,
        *,
        context: Any = None,
        timeout: float | None = None,
        default: bool | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "approve",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> bool:
        """Ask a person to approve. Waits for days if it takes days, and holds nothing meanwhile.

        After `timeout` seconds the answer is `default`; without one TimedOut is raised. `escalate`: whom to tell before
        that. The first answer counts. `webhooks`: of the gateway's, by name, all if none is named; `callback`: a URL
        that is told of this question too, at least once, at a host that the gateway's operator allows; elsewhere the
        run fails with RUN_CALLBACK_REFUSED. It stands in the journal: put no secret into it.
        """
        said = await self._ask(
            "approve", name, message, {"type": "boolean"}, context, timeout, default, escalate, webhooks, callback
        )
        return bool(said)

    async def input(
        self,
        message: str,
        *,
        type: Any = str,  # noqa: A002
        context: Any = None,
        timeout: float | None = None,
        default: Any = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "input",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> Any:
        """Ask a person for a value of this type; an answer of another type is refused, and the question stays open."""
        schema = TypeAdapter(type).json_schema()
        said = await self._ask("input", name, message, schema, context, timeout, default, escalate, webhooks, callback)
        return decode({"tier": "inline", "value": said}, type, where=f"the answer to {name}")

    async def select(
        self,
        message: str,
        options: Sequence[str],
        *,
        context: Any = None,
        timeout: float | None = None,
        default: str | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "select",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> str:
        """Ask a person to choose one of the options."""
        schema = {"type": "string", "enum": list(options)}
        said = await self._ask("select", name, message, schema, context, timeout, default, escalate, webhooks, callback)
        return str(said)

    async def review(
        self,
        message: str,
        artifact: Any,
        *,
        timeout: float | None = None,
        default: Review | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "review",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> Review:
        """Ask a person to look at something and approve it, have it revised, or reject it."""
        schema = Review.model_json_schema()
        plain = None if default is None else default.model_dump(mode="json")
        said = await self._ask("review", name, message, schema, artifact, timeout, plain, escalate, webhooks, callback)
        return Review.model_validate(said)

    async def _ask(
        self,
        form: str,
        name: str,
        message: str,
        schema: dict[str, Any],
        context: Any,
        timeout: float | None,
        default: Any,
        escalate: Escalation | Sequence[Escalation] | None,
        webhooks: Sequence[str],
        callback: str | None,
    ) -> Any:
        attempt = self._attempt
        where = f"the context of {name}"  # people read it, and no program: its type need not be known
        if not isinstance(context, bytes | Artifact | Secret):
            context = to_json(context, where=where)
        shown = None if context is None else await attempt.encoded(context, where=where)
        fallback = (
            None if default is None else await attempt.encoded(default, tier="inline", where=f"the default of {name}")
        )

        levels = [escalate] if isinstance(escalate, Escalation) else escalate or ()

        def put() -> dict[str, Any]:
            if timeout is not None:
                verify_seconds(timeout, f"the timeout of {name}")
            afters = [verify_seconds(level.after, f"an escalation of {name}") for level in levels]
            verify_order(afters, timeout, f"the escalations of {name}")
            request: dict[str, Any] = {
                "form": form,
                "message": message,
                "context": shown,
                "answer_schema": schema,
                "expires_at": None if timeout is None else time_text(attempt.host.now() + timeout),
                "default": fallback,
                "webhooks": list(webhooks),
            }
            if levels:
                now = attempt.host.now()
                request["escalations"] = [
                    {"at": time_text(now + level.after), "webhooks": list(level.webhooks)} for level in levels
                ]
            if callback is not None:
                request["callback"] = callback
            return {"request": request}

        given = {"form": form, "message": message, "context": shown}
        return await self._wait("ask", name, given, put)
