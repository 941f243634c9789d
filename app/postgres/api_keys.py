"""Tenants and API keys on PostgreSQL."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Self

import asyncpg

from app.core.errors import AccessNotFound, SchemaViolation
from app.core.limits import (
    ACCESS_CACHE_AGE_MS,
    ACCESS_CACHE_KEYS_MAX,
    ACCESS_LOOKUP_KEYS_MAX,
    ACCESS_LOOKUPS_AT_ONCE_MAX,
    API_KEY_LIFE_DAYS_MAX,
    NAME_CHARS_MAX,
    SHOWN_CHARS_MAX,
)
from app.domain.identity import (
    API_KEY_PREFIX,
    DEFAULT_TENANT,
    ROLES,
    ListedKey,
    Principal,
    StoredKey,
    parse_api_key,
    secret_digest,
)
from app.domain.ledger.queries import Page
from app.postgres.listener import Listener
from app.postgres.sessions import GATEWAY_ROLE, LOST, Closing, Sessions, connect, unavailable
from app.postgres.spent_sessions import PREFIX, PostgresSpentSessions

CHANNEL = "tga_access"
_LISTED = tuple(one.name for one in fields(ListedKey))

_LIFE_S_MAX = API_KEY_LIFE_DAYS_MAX * 86_400
_TENANT = re.compile(rf"(?!\.{{1,2}}\Z)[!-.0-~]{{1,{NAME_CHARS_MAX}}}")
_LABEL = re.compile(rf"[!-~]([ -~]{{0,{NAME_CHARS_MAX - 2}}}[!-~])?")
_IS_VALID = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp()) AS is_valid"
# Also an id that does not exist is answered with a row of the same size: time should not tell the two apart.
_LOAD = f"""
SELECT k.key_id IS NOT NULL AS exists, coalesce(secret_sha256, decode(repeat('00', 32), 'hex')) AS secret_sha256,
       coalesce(principal_id, 'nobody') AS principal_id, coalesce(tenant, 'default') AS tenant,
       coalesce(roles, '{{agent}}') AS roles, {_IS_VALID},
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS expires_in_s
  FROM unnest($1::text[]) WITH ORDINALITY AS asked(key_id, place)
  LEFT JOIN tga.api_keys k ON k.key_id = asked.key_id COLLATE "C"
 ORDER BY asked.place
"""  # noqa: S608 - a constant of this file


def _written(column: str) -> str:
    return f"""to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS {column}"""


_LIST = f"""
SELECT key_id, name, principal_id, tenant, roles, {_written("created_at")}, created_by, {_written("expires_at")},
       {_written("revoked_at")}, {_IS_VALID}
  FROM tga.api_keys k WHERE ($1::text IS NULL OR key_id = $1) ORDER BY k.created_at, k.key_id
"""  # noqa: S608 - a constant of this file
_PAGE = f"""
SELECT key_id, name, principal_id, tenant, roles, {_written("created_at")}, created_by, {_written("expires_at")},
       {_written("revoked_at")}, {_IS_VALID}, k.created_at AS made_at
  FROM tga.api_keys k
 WHERE k.tenant = $1 AND (k.created_at, k.key_id) > ($2, $3) ORDER BY k.created_at, k.key_id LIMIT $4
"""  # noqa: S608 - a constant of this file
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOCK_ADMIN_KEY = "SELECT pg_advisory_lock(hashtextextended('tga: the administrator''s key', 0))"


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant: str
    created_at: str


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key. `text` is the only copy of its secret that there will ever be."""

    listed: ListedKey
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Known:
    key: StoredKey
    until_s: float  # by this process's monotonic clock


class PostgresAccess(Closing):
    """Who may call. Made by `open` it remembers keys; made by the constructor it asks the database each time.

    A remembered key counts only while the channel of changes is heard, for at most ACCESS_CACHE_AGE_MS, and never past
    its expiry; then the database is asked again, whose clock alone judges. So a revocation counts as soon as it is
    heard, a moment after its commit. Ids that do not exist are not remembered: strangers would push the others out.
    """

    def __init__(self, sessions: Sessions, url: str) -> None:
        # Set here for good; the listener when it is opened.
        self._sessions = sessions
        self._url = url
        self._listener: Listener | None = None
        # What is remembered: written by lookups. The listener forgets keys that changed, and counts the changes.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._tenants = {DEFAULT_TENANT}  # tenants are never removed, so what once existed does
        self._changes = 0
        self.spent_sessions = PostgresSpentSessions(sessions, self._hears)  # told of on the same channel
        # Keys that no query asks for yet, with the callers that wait for them; and the tasks that ask.
        self._wanted: dict[str, list[asyncio.Future[StoredKey | None]]] = {}
        self._looking: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, sessions: Sessions, url: str) -> Self:
        access = cls(sessions, url)
        listener = Listener(url, CHANNEL, heard=access._heard, changed=access._forget_all)
        access._listener = await listener.open()
        return access

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def create_tenant(self, tenant: str) -> bool:
        """Whether it is new; a tenant that exists stays as it is."""
        if not _TENANT.fullmatch(tenant):
            expected = f"1 to {NAME_CHARS_MAX} printable ASCII characters, no space, no /, and not . or .."
            raise SchemaViolation("not the name of a tenant", expected=expected, found=_shown(tenant))
        (row,) = await self._sessions.commit("SELECT tga.create_tenant($1) AS is_new", tenant)
        return bool(row["is_new"])

    async def list_tenants(self) -> list[Tenant]:
        rows = await self._sessions.fetch(
            f"SELECT tenant, {_written('created_at')} FROM tga.tenants ORDER BY tenant"  # noqa: S608
        )
        return [Tenant(**dict(row)) for row in rows]

    async def has_tenant(self, tenant: str) -> bool:
        if tenant in self._tenants:
            return True
        found = bool(await self._sessions.fetch("SELECT FROM tga.tenants WHERE tenant = $1", tenant))
        if found and len(self._tenants) < ACCESS_CACHE_KEYS_MAX:
            self._tenants.add(tenant)
        return found

    async def create_key(
        self,
        *,
        name: str,
        principal_id: str,
        roles: Sequence[str],
        created_by: str,
        tenant: str = DEFAULT_TENANT,
        life_s: int | None = None,
    ) -> CreatedKey:
        """A new key for a principal; AccessNotFound without its tenant, SchemaViolation for what cannot be stored."""
        ordered = [role for role in ROLES if role in roles]
        if not ordered or set(roles) - set(ROLES):
            raise SchemaViolation("not the roles of a key", expected=f"some of {', '.join(ROLES)}", found=_shown(roles))
        if not _LABEL.fullmatch(name):
            expected = f"1 to {NAME_CHARS_MAX} printable ASCII characters, no space at either end"
            raise SchemaViolation("not the name of a key", expected=expected, found=_shown(name))
        if life_s is not None and not 1 <= life_s <= _LIFE_S_MAX:
            raise SchemaViolation("not the life of a key", expected=f"1 to {_LIFE_S_MAX} s, or none", found=life_s)
        Principal.made(principal_id=principal_id, tenant=tenant)
        Principal.made(principal_id=created_by, tenant=tenant)
        key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        (row,) = await self._sessions.commit(
            "SELECT tga.create_api_key($1, $2, $3, $4, $5, $6, $7, $8) AS created",
            key_id,
            secret_digest(secret),
            name,
            principal_id,
            tenant,
            ordered,
            created_by,
            life_s,
        )
        if row["created"] is None:
            raise AccessNotFound(
                "there is no such tenant", found=tenant, remedy="Create it first: `tga tenants create`."
            )
        (listed,) = await self._list(key_id)
        return CreatedKey(listed, f"{API_KEY_PREFIX}{key_id}_{secret}")

    async def list_keys(self) -> list[ListedKey]:
        """Every key there ever was, oldest first."""
        return await self._list(None)

    async def revoke_key(self, key_id: str) -> bool:
        """Whether it was revoked now, and not before; AccessNotFound when there is no such key."""
        (row,) = await self._sessions.commit("SELECT tga.revoke_api_key($1) AS revoked", key_id)
        self._forget(key_id)
        if row["revoked"] is None:
            raise AccessNotFound("there is no such API key", found=_shown(key_id))
        return bool(row["revoked"])

    async def find_key(self, key_id: str) -> StoredKey | None:
        return self.cached_key(key_id) or await self.load_key(key_id)

    def cached_key(self, key_id: str) -> StoredKey | None:
        known = self._known.get(key_id)
        if known is None or time.monotonic() >= known.until_s or not self._hears():
            return None
        self._known.move_to_end(key_id)
        return known.key

    async def load_key(self, key_id: str) -> StoredKey | None:
        """The key as the database has it now. Look-ups that arrive while one is under way go together in the next."""
        answer: asyncio.Future[StoredKey | None] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(key_id, []).append(answer)
        if len(self._looking) < ACCESS_LOOKUPS_AT_ONCE_MAX:
            task = asyncio.create_task(self._look())
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)
        return await answer

    async def _look(self) -> None:
        """One query after the other until no request waits. Strangers can make us ask, not ask often: however many keys
        they make up, a key that exists waits for one query, and the ledger's sessions stay free."""
        while self._wanted:
            asked = list(itertools.islice(self._wanted, ACCESS_LOOKUP_KEYS_MAX))
            waiting = [self._wanted.pop(key_id) for key_id in asked]
            found: Sequence[StoredKey | None] = ()
            error: Exception | None = None
            try:
                found = await self._load_all(asked)
            except Exception as failed:
                error = failed
            except BaseException:
                for answer in itertools.chain(*waiting):
                    answer.cancel()
                raise
            for place, answers in enumerate(waiting):
                for answer in answers:
                    if answer.done():
                        continue  # its request was given up
                    if error is not None:
                        answer.set_exception(error)
                    else:
                        answer.set_result(found[place])

    async def _load_all(self, key_ids: list[str]) -> list[StoredKey | None]:
        asked_at_s, changes, heard_before = time.monotonic(), self._changes, self._hears()
        rows = await self._sessions.fetch(_LOAD, key_ids)
        # A change that was heard since we asked may be one that this answer does not know of.
        may_remember = heard_before and self._hears() and changes == self._changes
        found: list[StoredKey | None] = []
        for key_id, row in zip(key_ids, rows, strict=True):
            exists, digest, principal_id, tenant, roles, is_valid, expires_in_s = row
            key = StoredKey(key_id, digest, principal_id, tenant, tuple(roles), is_valid)
            found.append(key if exists else None)
            if exists and may_remember:
                age_s = ACCESS_CACHE_AGE_MS / 1000
                if is_valid and expires_in_s is not None:
                    age_s = min(age_s, expires_in_s)
                self._known[key_id] = _Known(key, asked_at_s + age_s)
                self._known.move_to_end(key_id)
                if len(self._known) > ACCESS_CACHE_KEYS_MAX:
                    self._known.popitem(last=False)
        return found

    async def opens(self, text: str) -> bool:
        """Whether this text is a valid key of this database."""
        presented = parse_api_key(text)
        key = None if presented is None else await self.load_key(presented.key_id)
        if presented is None or key is None:
            return False
        return hmac.compare_digest(key.secret_sha256, presented.secret_sha256) and key.is_valid

    @asynccontextmanager
    async def holding_admin_lock(self) -> AsyncIterator[None]:
        """Gateways that start at once on one database make the administrator's key one after the other."""
        session = await connect(self._url, role=GATEWAY_ROLE)
        try:
            try:
                await session.fetchval(_LOCK_ADMIN_KEY)
            except (*LOST, asyncpg.PostgresError) as error:
                raise unavailable(error) from error
            yield
        finally:
            session.terminate()  # and with it the lock

    async def _list(self, key_id: str | None) -> list[ListedKey]:
        rows = await self._sessions.fetch(_LIST, key_id)
        return [ListedKey(**{**dict(row), "roles": tuple(row["roles"])}) for row in rows]

    def _hears(self) -> bool:
        return self._listener is not None and self._listener.is_live

    def _heard(self, payload: str) -> None:
        if payload.startswith(PREFIX):
            self.spent_sessions.heard(payload.removeprefix(PREFIX))
        else:
            self._forget(payload)

    def _forget(self, key_id: str) -> None:
        self._changes += 1
        self._known.pop(key_id, None)

    def _forget_all(self) -> None:
        self._changes += 1
        self._known.clear()
        self.spent_sessions.forget_all()


async def list_keys_of(sessions: Sessions, tenant: str, *, after: str | None, limit: int) -> Page[ListedKey]:
    """Every key that a tenant ever had, oldest first, without its secret. `after`: the `next` of the page before."""
    micros, _, key_id = (after or "0.").partition(".")
    since = _EPOCH + timedelta(microseconds=int(micros))
    rows = await sessions.fetch(_PAGE, tenant, since, key_id, limit + 1)
    items = [
        ListedKey(**{**{name: row[name] for name in _LISTED}, "roles": tuple(row["roles"])}) for row in rows[:limit]
    ]
    if len(rows) <= limit:
        return Page(items, None)
    last = rows[limit - 1]
    return Page(items, f"{(last['made_at'] - _EPOCH) // timedelta(microseconds=1)}.{last['key_id']}")


def _shown(value: object) -> str:
    return str(value)[:SHOWN_CHARS_MAX]
