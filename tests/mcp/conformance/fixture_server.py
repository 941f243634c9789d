"""The tools that the conformance suite asks a server for, as a plain MCP server over stdio (2025-11-25).

It is the upstream: between it and the suite stands the gateway. Every call is noted in the file that is named, with the
`_meta` it carried.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAVE = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAAAAA=="
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ADDRESS = {
    "$anchor": "addressDef",
    "type": "object",
    "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
}
SCHEMA_2020 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": ADDRESS},
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
HEADERS = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}
SECONDS = {"type": "object", "properties": {"seconds": {"type": "number"}, "label": {"type": "string"}}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOLS: dict[str, dict[str, Any]] = {
    "test_simple_text": NOTHING,
    "test_image_content": NOTHING,
    "test_audio_content": NOTHING,
    "test_embedded_resource": NOTHING,
    "test_multiple_content_types": NOTHING,
    "test_tool_with_progress": NOTHING,
    "test_error_handling": NOTHING,
    "json_schema_2020_12_tool": SCHEMA_2020,
    "test_headers": HEADERS,
    "greet": NAME,
    "slow_compute": SECONDS,
    "failing_job": SECONDS,
    "protocol_error_job": SECONDS,
}
SAYING = threading.Lock()
OUTPUT_SCHEMA = {"type": "object", "properties": {"greeting": {"type": "string"}}, "required": ["greeting"]}


def main() -> None:
    book = Path(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        params = message.get("params") or {}
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        match message["method"]:
            case "initialize":
                answer["result"] = {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "fixture", "version": "1"},
                }
            case "tools/list":
                answer["result"] = {"tools": [described(name, schema) for name, schema in TOOLS.items()]}
            case "tools/call":
                with book.open("a") as noted:
                    noted.write(json.dumps(params) + "\n")
                threading.Thread(target=answer_call, args=(answer, params), daemon=True).start()
                continue
            case _:
                answer["error"] = {"code": -32601, "message": "no such method"}
        say(answer)


def answer_call(answer: dict[str, Any], params: dict[str, Any]) -> None:
    if params["name"] in ("protocol_error_job", "failing_job"):
        time.sleep(1)
    if params["name"] == "protocol_error_job":
        answer["error"] = {"code": -32603, "message": "the job broke", "data": {"why": "it was asked to"}}
    else:
        answer["result"] = called(params["name"], params.get("arguments") or {}, params.get("_meta") or {})
    say(answer)


def described(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    made = {"name": name, "title": name.title(), "description": f"The suite's {name}.", "inputSchema": schema}
    if name == "greet":
        return {**made, "outputSchema": OUTPUT_SCHEMA, "annotations": {"readOnlyHint": True, "title": "Greet"}}
    return made


def called(name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": "This is a simple text response for testing."}
    image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
    match name:
        case "test_image_content":
            return {"content": [image]}
        case "test_audio_content":
            return {"content": [{"type": "audio", "data": WAVE, "mimeType": "audio/wav"}]}
        case "test_embedded_resource":
            return {"content": [resource("test://embedded-resource", "text/plain", "This is an embedded resource.")]}
        case "test_multiple_content_types":
            made = resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
            return {"content": [text, image, made]}
        case "test_tool_with_progress":
            for progress in (0, 50, 100):
                if "progressToken" in meta:
                    told = {"progressToken": meta["progressToken"], "progress": progress, "total": 100}
                    say({"jsonrpc": "2.0", "method": "notifications/progress", "params": told})
                time.sleep(0.05)
            return {"content": [text]}
        case "test_error_handling" | "failing_job":
            said = "This tool intentionally returns an error for testing"
            return {"content": [{"type": "text", "text": said}], "isError": True}
        case "greet":
            greeting = f"Hello, {arguments.get('name', 'world')}!"
            return {"content": [{"type": "text", "text": greeting}], "structuredContent": {"greeting": greeting}}
        case "slow_compute":
            time.sleep(float(arguments.get("seconds", 1)))
            return {"content": [{"type": "text", "text": f"done: {arguments.get('label', '')}"}]}
    return {"content": [text]}


def resource(uri: str, media_type: str, text: str) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": media_type, "text": text}}


def say(message: dict[str, Any]) -> None:
    with SAYING:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
