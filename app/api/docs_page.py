"""/docs: the OpenAPI document for people. An index by noun first, then each operation, then every shape."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any, Final

_PROBLEM: Final = "application/problem+json"
_OBJECT_DEPTH_MAX: Final = 3  # of objects that have no name of their own


def render_docs(document: dict[str, Any]) -> str:
    """The page's content."""
    return "".join(_Docs(document).parts())


class _Docs:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._schemas: dict[str, Any] = document["components"]["schemas"]
        self._by_noun: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                self._by_noun.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))

    def parts(self) -> Iterator[str]:
        yield f"<p>{_words(self._document['info']['description'])}</p>"
        yield '<p><a href="/openapi.json">For programs: openapi.json</a>. <a href="/errors">Every error</a>.</p>'
        yield from self._index()
        about = {tag["name"]: tag["description"] for tag in self._document.get("tags", [])}
        for noun, operations in self._by_noun.items():
            yield f'<h2 id="{_anchor(noun)}">{html.escape(noun.capitalize())}</h2><p>{_words(about.get(noun, ""))}</p>'
            for method, path, operation in operations:
                yield from self._operation(method, path, operation)
        yield '<h2 id="shapes">Shapes</h2>'
        for name, schema in self._schemas.items():
            yield f'<h3 id="shape-{name}">{name}</h3>'
            yield f"<p>{_words(schema.get('description', ''))}</p>{self._fields(schema)}"

    def _index(self) -> Iterator[str]:
        yield "<nav><ul>"
        for noun, operations in self._by_noun.items():
            yield f'<li><a href="#{_anchor(noun)}">{html.escape(noun.capitalize())}</a><ul>'
            for method, path, operation in operations:
                summary = html.escape(operation.get("summary", ""))
                label = f"<code>{method} {html.escape(path)}</code>"
                yield f'<li><a href="#{operation["operationId"]}">{label}</a> {summary}</li>'
            yield "</ul></li>"
        yield '<li><a href="#shapes">Shapes</a></li></ul></nav>'

    def _operation(self, method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
        yield f'<h3 id="{operation["operationId"]}"><code>{method} {html.escape(path)}</code></h3>'
        yield f"<p><b>{_words(operation.get('summary', ''))}</b> <small>{operation['operationId']}</small></p>"
        yield _table(
            (
                parameter["name"],
                f"{self._type(parameter['schema'])}, in the {parameter['in']}{_required(parameter.get('required'))}",
                parameter.get("description", ""),
            )
            for parameter in operation.get("parameters", [])
        )
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            yield f"<h4>Body</h4><p>{_words(body['schema'].get('description', ''))}</p>{self._fields(body['schema'])}"
            yield _example(body.get("example"))
        yield "<h4>Answers</h4>"
        for status, response in operation["responses"].items():
            yield self._answer(status, response)

    def _answer(self, status: str, response: dict[str, Any]) -> str:
        contents = response.get("content", {})
        if _PROBLEM in contents:
            codes = ", ".join(f'<a href="/errors#{code.lower()}">{code}</a>' for code in contents[_PROBLEM]["examples"])
            return f"<p><code>{status}</code> {codes}</p>"
        told = [f"<p><code>{status}</code> {_words(response['description'])}</p>"]
        headers = (
            (name, self._type(of["schema"]), of.get("description", ""))
            for name, of in response.get("headers", {}).items()
        )
        told.append(_table(headers))
        for media_type, content in contents.items():
            schema = content.get("schema", {})
            told.append(f"<p>{html.escape(media_type)}{': ' + self._type(schema) if schema else ''}</p>")
            told.append(_example(self._example_of(content)))
        return "".join(told)

    def _example_of(self, content: dict[str, Any]) -> Any:
        schema = content.get("schema", {})
        for holder in (content, self._found(schema) if "$ref" in schema else schema):
            if "example" in holder:
                return holder["example"]
        for example in content.get("examples", {}).values():
            return (self._found(example) if "$ref" in example else example)["value"]
        return None

    def _fields(self, schema: dict[str, Any]) -> str:
        required = schema.get("required", [])
        fields = schema.get("properties", {})
        if not fields:
            return f"<p>{self._type(schema)}</p>"
        return _table(
            (name, self._type(field) + _required(name in required), field.get("description", ""))
            for name, field in fields.items()
        )

    def _type(self, schema: dict[str, Any] | bool, depth: int = 0) -> str:
        """What a value may be, in a few words; a named shape is a link to it."""
        if isinstance(schema, bool):
            return "any" if schema else "nothing"
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/components/schemas/")
            if "/" not in name:
                return f'<a href="#shape-{name}">{name}</a>'
            return self._type(self._found(schema), depth)
        if "const" in schema:
            return f"<code>{html.escape(json.dumps(schema['const']))}</code>"
        if "enum" in schema:
            return " or ".join(f"<code>{html.escape(json.dumps(value))}</code>" for value in schema["enum"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return " or ".join(dict.fromkeys(self._type(one, depth) for one in schema[several]))
        kinds = schema.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return " or ".join(self._kind(kind, schema, depth) for kind in kinds)

    def _kind(self, kind: str, schema: dict[str, Any], depth: int) -> str:
        if kind == "array" and "items" in schema:
            return f"list of {self._type(schema['items'], depth)}"
        if kind == "object" and schema.get("properties") and depth < _OBJECT_DEPTH_MAX:
            inner = "; ".join(
                f"{html.escape(n)}: {self._type(of, depth + 1)}" for n, of in schema["properties"].items()
            )
            return f"{{{inner}}}"
        least, most = schema.get("minimum"), schema.get("maximum")
        if kind in ("integer", "number") and least is not None and most is not None:
            return f"{kind} from {least:,} to {most:,}"
        if kind == "string" and "maxLength" in schema:
            return f"string of at most {schema['maxLength']:,}"
        return kind

    def _found(self, reference: dict[str, Any]) -> dict[str, Any]:
        at: Any = self._document
        for part in reference["$ref"].removeprefix("#/").split("/"):
            at = at[part]
        found: dict[str, Any] = at
        return found


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    """Name, type (as HTML) and description; nothing where there is no row."""
    made = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{kind}</td><td>{_words(about)}</td></tr>"
        for name, kind, about in rows
    )
    return f"<table>{made}</table>" if made else ""


def _example(value: Any) -> str:
    if value is None:
        return ""
    shown = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return f"<details><summary>Example</summary><pre>{html.escape(shown)}</pre></details>"


def _words(text: str) -> str:
    """Text with `code` in it."""
    pieces = html.escape(" ".join(text.split())).split("`")
    return "".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces))


def _required(is_required: object) -> str:
    return ", required" if is_required else ""


def _anchor(noun: str) -> str:
    return noun.replace(" ", "-")
