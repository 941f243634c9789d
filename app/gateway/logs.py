"""What the gateway writes to stderr besides the lines of calls: one line each, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Final

import orjson

from app.core.limits import LOG_MESSAGE_CHARS_MAX, LOG_TRACEBACK_CHARS_MAX
from app.edge.call_lines import LogFormat, on_one_line

_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code not in (9, 10)} | {
    0x85: "\\x85",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class TextFormatter(logging.Formatter):
    """One line, but for tracebacks, whose lines are set in: what strangers have named cannot begin another."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = _message(record).replace("\n", "\\n").translate(_CONTROL)
        said = f"{_time(record)} {record.levelname} {record.name}: {record.message}"
        if record.exc_info:
            traceback = self.formatException(record.exc_info)[-LOG_TRACEBACK_CHARS_MAX:].translate(_CONTROL)
            said += "\n    " + traceback.replace("\n", "\n    ")
        return said


class JsonFormatter(logging.Formatter):
    """One object a line, with its traceback, if there is one, inside."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)[-LOG_TRACEBACK_CHARS_MAX:]
        plain = {name: value.encode("utf-8", "replace").decode("utf-8") for name, value in told.items()}
        return on_one_line(orjson.dumps(plain).decode())


def _message(record: logging.LogRecord) -> str:
    """What is said, never too much of it. Arguments that do not fit are left out: `logging` itself would write them,
    whatever they are, on lines of its own."""
    try:
        said = record.getMessage()
    except Exception:
        said = f"{record.msg} (its arguments do not fit)"
    return said if len(said) <= LOG_MESSAGE_CHARS_MAX else said[:LOG_MESSAGE_CHARS_MAX] + "…"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_to_stderr(log_format: LogFormat) -> None:
    """From here on everything that is logged goes to stderr, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("tga").setLevel(logging.INFO)
    # It tells with a traceback of every session that cannot be had while the store is away, which we tell of ourselves.
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
