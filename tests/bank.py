"""The demonstration's bank, as a test's configuration names it."""

from __future__ import annotations

from typing import Final

_TOOLS: Final = {
    "charge": 'class = "write"',
    "slow_charge": 'class = "write"',
    "flaky": 'class = "write"',
    "pay_card": 'class = "write"\nsecret_arguments = ["/card"]',
    "refund": 'class = "write"\ntags = ["approval"]',
    "refund_soon": 'class = "write"\ntags = ["approval"]\napproval_timeout_ms = 2000',
    "balance": 'class = "read"',
    "charge_status": 'class = "read"',
    "fail": 'class = "read"',
}
AMOUNT_SCHEMA: Final = (
    'input_schema = { type = "object", required = ["amount"], properties = { amount = { type = "integer" } } }'
)


def bank_tables(url: str, settings: dict[str, int], tools: dict[str, str], *, server: str = "bank") -> str:
    """The tables of tga.toml for the bank and these tools of it: each with what belongs to it, and the lines given."""
    lines = [f"[servers.{server}]", 'transport = "http"', f'base_url = "{url}"']
    lines += [f"{name} = {value}" for name, value in settings.items()]
    for tool, more in tools.items():
        lines += ["", f"[servers.{server}.tools.{tool}]", _TOOLS[tool], *([more] if more else [])]
    return "\n".join([*lines, "", ""])
