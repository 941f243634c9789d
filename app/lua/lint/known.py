"""What a Lua program finds in its environment, as far as `tga lint` has to know it by name."""

from __future__ import annotations

from typing import Final

# Outside a checkpoint these are seeded or fixed, and warn: a replay is another time, on another machine perhaps.
NONDETERMINISTIC: Final = {
    ("math", "random"): "chance decides anew each time",
    ("math", "randomseed"): "it seeds chance, which decides anew each time",
    ("os", "time"): "the clock says something else each time",
    ("os", "date"): "the clock says something else each time",
    ("os", "clock"): "the time a processor takes is another each time",
    ("os", "getenv"): "another machine has another environment",
    ("os", "tmpname"): "it is another name each time",
}
# What records the result of the function that it is given, and what waits for a person.
RECORDING: Final = frozenset({("step",), ("checkpoint",), ("Step", "checkpoint"), ("Step", "run")})
PEOPLE: Final = frozenset({"approve", "input", "review", "select", "escalate"})
WAITS: Final = frozenset({("sleep",), ("signal",)})
MAKERS: Final[dict[tuple[str, ...], str]] = {
    ("agent",): "agent",
    ("Agent",): "agent",
    ("model",): "model",
    ("Model",): "model",
    ("procedure",): "procedure",
    ("Procedure",): "procedure",
}
# Members of tables that have these and no others.
MEMBERS: Final[dict[str, frozenset[str]]] = {
    "Human": PEOPLE,
    "Step": frozenset({"checkpoint", "run", "parallel"}),
    "os": frozenset({"time", "date", "clock", "getenv", "tmpname", "difftime"}),
}
_LIBRARIES: Final = """
_G _VERSION assert collectgarbage coroutine error getmetatable ipairs load math next os pairs pcall print rawequal
rawget rawlen rawset select setmetatable string table tonumber tostring type utf8 xpcall
"""
_LANGUAGE: Final = """
Agent File Human Log Model Procedure Step agent checkpoint field http_client input model null output parallel procedure
signal sleep state step tactus tool
"""
GLOBALS: Final = frozenset((_LIBRARIES + _LANGUAGE).split())
# Not there, and what to use.
MISSING: Final = {
    "io": "read files that were submitted with the program with File.read(name)",
    "debug": "use Log.info(...) to see what happens",
    "require": "put all of the program into one file; data goes into files, which File.read(name) reads",
    "package": "put all of the program into one file",
    "dofile": "put all of the program into one file",
    "loadfile": "put all of the program into one file",
    "warn": "use Log.warn(...)",
}
# Library functions that take no time worth sparing; a function of the program's own may.
CHEAP: Final = frozenset(
    {"tostring", "tonumber", "type", "ipairs", "pairs", "next", "select", "print", "assert", "error"}
)
