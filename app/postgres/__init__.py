"""The ledger on PostgreSQL: the only package that imports asyncpg."""
