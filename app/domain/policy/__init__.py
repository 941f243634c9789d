"""Decisions on one action request."""
