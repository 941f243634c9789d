"""What fields of `tga.toml` may hold: names, addresses, paths, pointers, each with its bounds."""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError
from yarl import URL

from app.core.limits import (
    CONFIGURED_LIMIT_MAX,
    CREDENTIAL_BYTES_MAX,
    LOG_ORIGIN_CHARS_MAX,
    NAME_CHARS_MAX,
    POINTER_CHARS_MAX,
    SECRET_ARGUMENTS_MAX,
    URL_CHARS_MAX,
)
from app.domain.ledger.documents import Name

Algorithm = Literal["EdDSA", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]


_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])+)+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
# What the gateway itself says in a request, and what would change how the request is framed or carried.
_GATEWAY_HEADERS = frozenset(
    {"idempotency-key", "traceparent", "tracestate", "user-agent", "accept", "accept-encoding"}
    | {"last-event-id", "host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
)
_GATEWAY_HEADER_PREFIXES = ("tga-", "content-", "proxy-", "mcp-")


def unfit(expected: str) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{expected}", {"expected": expected})


def _segment(name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise unfit("a name without /, which separates tenant and server, and not . or ..")
    return name


def _tool_name(name: str) -> str:
    if name in (".", ".."):
        raise unfit("a name that can be a segment of a URL")
    return name


def _url(written: str, *, signs_refused: str, expected: str) -> str:
    try:
        url = URL(written)
        is_fit = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        is_fit = False
    # Compared as written: an empty query or fragment, a space or a backslash is as wrong as a full one.
    if not is_fit or any(sign in written for sign in signs_refused) or not written.isprintable():
        raise unfit(expected)
    return written


def _base_url(written: str) -> str:
    expected = "http://host[:port][/path] or https://, without user, query or fragment"
    return _url(written, signs_refused="@?#\\ ", expected=expected)


def _url_with_query(written: str) -> str:
    expected = "http://host[:port][/path][?query] or https://, without user or fragment"
    _url(written.partition("?")[0], signs_refused="@#\\ ", expected=expected)
    return _url(written, signs_refused="#\\ ", expected=expected)


def _keys_url(written: str) -> str:
    _url_with_query(written)
    url = URL(written)
    # An attacker who answers in the key server's place can sign tokens for every principal.
    if url.scheme == "http" and not _is_this_machine(url.host or ""):
        raise unfit("https://, or http:// to this machine")
    return written


def _issuer_url(written: str) -> str:
    _base_url(written)
    return _keys_url(written)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise unfit("the name of an HTTP header")
    if name.lower() in _GATEWAY_HEADERS or name.lower().startswith(_GATEWAY_HEADER_PREFIXES):
        raise unfit("a header that the gateway does not set itself")
    return name


def distinct_headers(headers: dict[str, Any]) -> dict[str, Any]:
    if len({name.lower() for name in headers}) < len(headers):
        raise unfit("each header once; case does not tell them apart")
    return headers


def _object_store_url(written: str) -> str:
    expected = "s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix] or file:///folder"
    try:
        url = urlsplit(written)
        is_fit = (url.scheme in ("s3", "gs", "az") and bool(url.netloc)) or (
            url.scheme == "file" and not url.netloc and len(url.path) > 1
        )
    except ValueError:
        is_fit = False
    if not is_fit or any(sign in written for sign in "@?#\\ ") or not written.isprintable() or ".." in written:
        raise unfit(expected)
    return written


def _pointers(pointers: list[str]) -> list[str]:
    steps = sorted(split_pointer(pointer) for pointer in pointers)
    for one, other in pairwise(steps):
        if other[: len(one)] == one:  # in this order, what is inside another follows at once
            raise unfit("pointers to different values, none inside another")
    return pointers


def split_pointer(pointer: str) -> tuple[str, ...]:
    """The steps of a JSON pointer (RFC 6901) that leads to a member: not the root, and no step without a name."""
    if not _POINTER.fullmatch(pointer):
        # "/" and "/card/" name members called "": surely meant otherwise, and then the value would stand in clear.
        raise unfit('JSON pointers to members of the arguments, such as "/card"')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer[1:].split("/"))


def _path(written: object, info: ValidationInfo) -> Path:
    if isinstance(written, Path):
        return written
    if not isinstance(written, str) or not written or not written.isprintable():
        raise unfit("a path, absolute or from the folder of this file")
    return ((info.context or {}).get("path") or Path()).parent / written


VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Value = Annotated[str, StringConstraints(max_length=CREDENTIAL_BYTES_MAX, pattern=r"^[^\x00]*$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX, pattern=r"^[^\x00]*$")]
SegmentName = Annotated[Name, AfterValidator(_segment)]
ToolName = Annotated[Name, AfterValidator(_tool_name)]
BaseUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_base_url)]
PlainQueryUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_url_with_query)]
QueryUrl = Annotated[PlainQueryUrl, Field(repr=False)]
ObjectStoreUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_object_store_url)]
KeysUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_keys_url)]
IssuerUrl = Annotated[str, Field(max_length=URL_CHARS_MAX), AfterValidator(_issuer_url)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
ConfigPath = Annotated[Path, PlainValidator(_path)]
Pointers = Annotated[
    list[Annotated[str, Field(max_length=POINTER_CHARS_MAX)]],
    Field(max_length=SECRET_ARGUMENTS_MAX),
    AfterValidator(_pointers),
]
Claim = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=URL_CHARS_MAX)]
# What C2SP admits in the name of a key, kept to printable ASCII.
Origin = Annotated[str, StringConstraints(pattern=r"^[!-*,-~]+$", max_length=LOG_ORIGIN_CHARS_MAX)]
HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+$", max_length=253)]
HostAndPort = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$", max_length=259)]
PageOrigin = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://[^/?#@ ]+$", max_length=URL_CHARS_MAX)]
Limit = Annotated[int, Field(ge=1, le=CONFIGURED_LIMIT_MAX)]

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid")  # of every table
