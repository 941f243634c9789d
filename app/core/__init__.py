"""Pure rules of documents and chains: no I/O, no clock, no randomness, no asyncio."""
