"""The codes that the effect of a failed call can have (`tool_effect.error.code`), what each means, and what to do.

They are no errors of the gateway: the call was made, or certainly not, and this is what became of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class EffectCode(NamedTuple):
    code: str
    basis: str
    meaning: str
    remedy: str


EFFECT_CODES: Final = (
    EffectCode(
        "NOT_SENT",
        "not_sent",
        "The server took no connection for `unreachable_for_ms`, or the arguments cannot be written. Nothing of the "
        "call was sent, so certainly nothing was executed. The key keeps this answer.",
        "Use a new key once the server is back (`tga servers`): that is safe.",
    ),
    EffectCode(
        "OUTCOME_UNKNOWN",
        "unknown",
        "The call was sent, `max_attempts` times at most, and no definite answer came. It may have been executed, and "
        "by a server that ignores keys more than once.",
        "Look at the server before a new call is made. `on_unknown_outcome` says what is done in such a case.",
    ),
    EffectCode(
        "RESOLVED_AS_FAILED",
        "resolution",
        "The outcome was unknown, and an operator found out that it failed; the message is the operator's.",
        "Act on the operator's words; a new call needs a new key.",
    ),
    EffectCode(
        "HTTP_<status>",
        "answer",
        "The HTTP server refused the call with this status (300 to 499, but for 408, 409, 425 and 429).",
        "Read the output, which is the server's answer.",
    ),
    EffectCode(
        "MCP_<code>",
        "answer",
        "The MCP server answered with a JSON-RPC error of this code, which is the output.",
        "Read the message, which is the server's.",
    ),
    EffectCode(
        "MCP_TOOL_ERROR",
        "answer",
        "The MCP tool's result says `isError`; the result is the output.",
        "Read the output.",
    ),
    EffectCode(
        "MCP_INPUT_REQUIRED",
        "answer",
        "The MCP tool wants more input from its caller, which the gateway does not pass on.",
        "Give what it wants with the arguments, if it takes it there.",
    ),
    EffectCode(
        "MCP_BAD_RESULT",
        "answer",
        "The MCP server's result is no object.",
        "Report it to the server's author.",
    ),
    EffectCode(
        "ANSWER_TOO_LARGE",
        "answer",
        "The answer is too large to be read whole, and what was looked through does not tell its outcome.",
        "Look at the server before a new call is made; ask it for less.",
    ),
)
