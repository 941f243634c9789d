"""A deliverer in a process of its own, to be killed: `python -m tests.webhooks.deliverer DATABASE WEBHOOK LEASE_MS`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from app.connectors.webhooks import Webhooks
from app.keys.keyring import Keyring
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import Sessions
from tests.webhooks.sending import HandClock, load_announcement


async def main(database_url: str, url: str, lease_ms: int, keys: Path) -> None:
    async with await Sessions.open(database_url, sessions_max=2) as sessions:
        deliverer = Webhooks(
            {"approvals": url},
            PostgresOutbox(sessions),
            load=load_announcement,
            sign=Keyring.open(keys, {}).sign,
            clock=HandClock(),
            timeout_ms=lease_ms - 1,
            lease_ms=lease_ms,
        )
        await deliverer.deliver_due()
        await deliverer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
