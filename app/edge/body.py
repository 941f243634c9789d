"""The body of a request: bounded bytes, strict JSON, exactly the fields that there are."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from app.config.wording import listed, pointer_to, shown
from app.core.canonical import parse_object
from app.core.errors import InputMalformed, InputTooLarge, SchemaViolation
from app.core.limits import DOCUMENT_BYTES_MAX

_M = TypeVar("_M", bound=BaseModel)
_UTF_8: Final = frozenset({"utf-8", "utf8"})


class ClientGone(Exception):
    """The client went away in the middle of its request; no answer can reach it."""


async def read_body(scope: Scope, receive: Receive, model: type[_M], *, is_optional: bool = False) -> _M:
    """The body as `model`, or InputMalformed, InputTooLarge or SchemaViolation naming the place.

    Never holds more than the limit and one piece of what is received. How long a body may take to arrive is the
    protocol's business.
    """
    raw = await read_bytes(scope, receive)
    return checked(model, {} if is_optional and not raw else parse_object(raw))


async def read_bytes(scope: Scope, receive: Receive) -> bytes:
    """The body as it is, bounded in the same way."""
    _verify_headers(scope)
    return await _read_bytes(receive)


def checked(model: type[_M], fields: dict[str, Any]) -> _M:
    """The fields as `model`, or SchemaViolation naming the first that is missing, unknown or wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        what = f"the body at {pointer_to(first['loc'])}"
        if first["type"] == "extra_forbidden":
            raise SchemaViolation(
                what, expected=f"only the fields {listed(model.model_fields)}", found="another one"
            ) from None
        if first["type"] == "missing":
            raise SchemaViolation(what, expected="the field", found="nothing") from None
        raise SchemaViolation(what, expected=first["msg"], found=shown(first["input"])) from None


async def _read_bytes(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        return bytes(message.get("body", b""))  # in one piece, as most are; the parser looks at its size
    pieces, size = [], 0
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > DOCUMENT_BYTES_MAX:
            raise _too_large()
        if not message.get("more_body", False):
            return b"".join(pieces)
        message = await receive()
    raise ClientGone


def _verify_headers(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            # The parser has made sure that it is a number, and the only one.
            if int(value) > DOCUMENT_BYTES_MAX:
                raise _too_large(int(value))
        elif name == b"content-type":
            _verify_charset(value.decode("latin-1"))
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InputMalformed(
                "the body is encoded", expected="no Content-Encoding", found=shown(value.decode("latin-1"))
            )


def _verify_charset(content_type: str) -> None:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _UTF_8:
            raise InputMalformed("the body is not in UTF-8", expected="charset=utf-8", found=shown(charset))


def _too_large(size_bytes: int | None = None) -> InputTooLarge:
    return InputTooLarge("the body is too large", expected=f"at most {DOCUMENT_BYTES_MAX} bytes", found=size_bytes)
