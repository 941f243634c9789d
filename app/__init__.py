"""TGA Gateway: every tool call decided, dispatched once, and on a verifiable log."""

__version__ = "0.1.0"
