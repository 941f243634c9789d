"""The text of a policy file: its policies and their lines, bounds that keep the parser safe, and where an error is.

Cedar's parser says what is wrong, but not where, and on text that nests too deeply it overflows the stack and ends the
process. Both are mended here, with no more knowledge of the language than its strings, comments and semicolons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from app.core.canonical import canonical_enclosed
from app.core.errors import InputMalformed, InputTooLarge, PolicyInvalid
from app.core.limits import POLICY_BYTES_MAX, POLICY_NESTING_MAX, POLICY_OPERATORS_MAX

# Every character is part of exactly one match. An unterminated string reaches to the end, as it does for Cedar.
_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\])*"?|//[^\n]*|\s+|\w+|::|&&|\|\||[=!<>]=|.', re.DOTALL)
_QUOTED: Final = re.compile(r"`([^`]+)`")
_OPENS: Final = frozenset("([{")
_CLOSES: Final = frozenset(")]}")
# What does not make an expression deeper: names, strings, lists, paths. Words that do are operators.
_FLAT: Final = frozenset(",;:@") | {"::"}
_WORD_OPERATORS: Final = frozenset({"if", "has", "like", "in", "is"})
_UNFINISHED: Final = "unexpected end of input"


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    line: int
    end: int  # in its statement


@dataclass(frozen=True, slots=True)
class Statement:
    """One policy as it is written, up to its semicolon; `line` is where it begins, comments before it left out."""

    line: int
    tokens: tuple[Token, ...]
    text: str

    def as_permit(self, *, with_conditions: bool) -> str:
        """The text of a valid policy as a permit of the same scope, for asking whether it holds."""
        words = [token.text for token in self.tokens]
        # An annotation may be called `permit` too, but then an @ stands before it.
        effect = next(n for n, word in enumerate(words) if word in ("permit", "forbid") and words[n - 1 : n] != ["@"])
        scope_end = effect + words[effect:].index(")")  # no brackets but [] within a scope
        last = self.tokens[-1] if with_conditions else self.tokens[scope_end]
        body = self.text[self.tokens[effect].end : last.end]
        return "permit" + (body if with_conditions else body + ";")


def read_statements(text: str, *, name: str) -> list[Statement]:
    """The policies in `text`, or PolicyInvalid if Cedar's parser cannot be trusted with it."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise PolicyInvalid(f"{name} is not UTF-8 text") from None
    if size > POLICY_BYTES_MAX:
        raise PolicyInvalid(f"{name} is too large", expected=f"at most {POLICY_BYTES_MAX} bytes", found=size)
    try:
        canonical_enclosed(text)  # it goes on the record, where every line feed and every quote takes two bytes
    except (InputMalformed, InputTooLarge) as error:
        raise PolicyInvalid(
            f"{name} cannot be recorded: {error.what}", expected=error.expected, found=error.found
        ) from None
    statements = list(_split(text))
    for statement in statements:
        _verify_bounds(statement, name)
    return statements


def _split(text: str) -> Iterator[Statement]:
    line, start, tokens = 1, 0, list[Token]()
    for match in _TOKEN.finditer(text):
        found = match.group()
        if not found.isspace() and not found.startswith("//"):
            if not tokens:
                start = match.start()
            tokens.append(Token(found, line, match.end() - start))
            if found == ";":
                yield Statement(tokens[0].line, tuple(tokens), text[start : match.end()])
                tokens = []
        line += found.count("\n")
    if tokens:  # not finished: the parser will say so
        yield Statement(tokens[0].line, tuple(tokens), text[start:])


def _verify_bounds(statement: Statement, name: str) -> None:
    depth = operators = 0
    for token in statement.tokens:
        depth += (token.text in _OPENS) - (token.text in _CLOSES)
        operators += _is_operator(token.text)
        if depth > POLICY_NESTING_MAX:
            raise PolicyInvalid(
                f"{name}, line {token.line}: brackets nest too deeply", expected=f"at most {POLICY_NESTING_MAX}"
            )
        if operators > POLICY_OPERATORS_MAX:
            raise PolicyInvalid(
                f"{name}, line {token.line}: the policy that begins at line {statement.line} has too many operators",
                expected=f"at most {POLICY_OPERATORS_MAX}",
                remedy="Write it as several policies, or compare with a set: [1, 2, 3].contains(…).",
            )


def _is_operator(token: str) -> bool:
    if token[0].isalnum() or token[0] == "_":
        return token in _WORD_OPERATORS
    return token[0] != '"' and token not in _FLAT and token not in _CLOSES and token not in ("(", "{")


def place_of_error(statements: list[Statement], fault_in: Callable[[str], str | None]) -> tuple[int | None, str | None]:
    """The line and message of the first error, or None where it cannot be told. `fault_in` parses a text."""
    for statement in statements:
        fault = fault_in(statement.text)
        if fault is not None:
            return _line_of(fault, statement, fault_in), fault
    return None, None


def _line_of(fault: str, statement: Statement, fault_in: Callable[[str], str | None]) -> int:
    tokens = statement.tokens
    if fault == _UNFINISHED:
        return tokens[-1].line
    # A text that is cut before its error is only unfinished: the shortest one that is more than that ends at the error
    # or one token behind it.
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        found = fault_in(statement.text[: tokens[middle - 1].end])
        if found is None or found == _UNFINISHED:
            low = middle + 1
        else:
            high = middle
    quoted = _QUOTED.search(fault)
    named = quoted.group(1) if quoted is not None else fault.rpartition(": ")[2]
    for token in reversed(tokens[:low]):
        if token.text == named:
            return token.line
    return tokens[low - 1].line if low < len(tokens) or fault == "invalid token" else statement.line
