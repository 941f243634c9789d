"""The shapes of statistics."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from app.api.documents import TALLY_EXAMPLE, Shape, TallyDocument
from app.domain.ledger.documents import Name, Time


class TotalDocument(TallyDocument):
    asked_per_minute: float


class SpanTally(TallyDocument):
    began: Time


class ServerTally(TallyDocument):
    server_id: Name


class ToolTally(TallyDocument):
    server_id: Name
    tool_name: Name


class NowDocument(Shape):
    """Counted up to 1000 each."""

    waiting: int = Field(description="Calls that wait for a supervisor.")
    held: int = Field(description="Calls whose outcome is unknown, and which wait for an operator.")
    in_flight: int


class StatisticsDocument(Shape):
    """By when calls were asked for, in whole spans: the window begins up to one span earlier than was asked for. What
    was recorded last is counted about a second later; `folded_leaves` of `tree_size` are."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "since": "2026-01-01T00:00:00.000Z",
                "until": "2026-01-02T00:00:00.000Z",
                "span_s": 1800,
                "total": {**TALLY_EXAMPLE, "asked_per_minute": 0.022},
                "decided_by": {"policy": 29, "person": 1},
                "rules": {"every-tool": 30},
                "errors": {"HTTP_422": 1},
                "now": {"waiting": 1, "held": 0, "in_flight": 0},
                "by_time": [{"began": "2026-01-01T12:00:00.000Z", **TALLY_EXAMPLE}],
                "by_server": [{"server_id": "pay", **TALLY_EXAMPLE}],
                "by_tool": [{"server_id": "pay", "tool_name": "charge", **TALLY_EXAMPLE}],
                "tools_left_out": 0,
                "folded_leaves": 124,
                "tree_size": 124,
            }
        }
    )
    since: Time
    until: Time
    span_s: int = Field(description="60, 1800, 14400 or 86400, by the length of the window.")
    total: TotalDocument
    decided_by: dict[str, int] = Field(description="Decisions by policy, person, expiry and withdrawal.")
    rules: dict[str, int] = Field(description="Decisions by the policies that determined them.")
    errors: dict[str, int] = Field(description="Failed calls by the code of their error.")
    now: NowDocument
    by_time: list[SpanTally] = Field(description="Spans without calls are left out.")
    by_server: list[ServerTally]
    by_tool: list[ToolTally] = Field(description="Those with the most calls first.")
    tools_left_out: int
    folded_leaves: int
    tree_size: int
