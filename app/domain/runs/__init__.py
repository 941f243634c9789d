"""Runs: durable programs on the ledger. What is here is pure; engine and store come on top of it."""
