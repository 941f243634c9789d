"""The administrator's key of a first start: in the database, and in a file on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app.core.errors import TgaError
from app.keys.admin_key import read_key_file, replace_key_file
from app.postgres.api_keys import PostgresAccess

ADMIN_PRINCIPAL = "admin"


async def ensure_admin_key(access: PostgresAccess, path: Path) -> bool:
    """See to it that the file holds a valid key of this database; whether a new one was made for that.

    Gateways that start at once on one database wait for each other, so that the last one to write has not replaced a
    key that another relies on. A crash in between leaves a key in the database that has no holder.
    """
    async with access.holding_admin_lock():
        text = await asyncio.to_thread(read_key_file, path)
        if text is not None and await access.opens(text):
            return False
        created = await access.create_key(
            name="administrator", principal_id=ADMIN_PRINCIPAL, roles=["admin"], created_by="first-start"
        )
        try:
            await asyncio.to_thread(replace_key_file, path, created.text)
        except TgaError:
            await access.revoke_key(created.listed.key_id)
            raise
        return True
