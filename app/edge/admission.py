"""Back-pressure: a caller that sends too fast or has too much under way is refused at once, and nothing is stored.

Everything here counts; nothing waits. Bounds of principals hold within this process; several gateways each have
their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from app.core.errors import GatewayBusy, RateLimited, TooManyInFlight
from app.core.limits import PRINCIPALS_REMEMBERED
from app.domain.identity import Principal


class Limits(Protocol):
    """`[limits]` of the configuration."""

    @property
    def requests_per_second(self) -> int: ...
    @property
    def burst(self) -> int: ...
    @property
    def in_flight_per_principal(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def event_subscribers(self) -> int: ...
    @property
    def waiting_workers(self) -> int: ...


class TokenBucket:
    """A token bucket: at most `burst` at once and `per_second` in the long run. Its user tells it the time."""

    __slots__ = ("_at", "_burst", "_per_second", "_tokens")

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float) -> bool:
        self._refill(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._tokens >= self._burst

    def wait_s(self) -> int:
        """Whole seconds until there is one again, at least one."""
        return max(1, math.ceil((1 - self._tokens) / self._per_second))

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
            self._at = now


class _PrincipalLoad:
    """What one principal has under way."""

    __slots__ = ("bucket", "in_flight", "polling", "subscribed")

    def __init__(self, bucket: TokenBucket) -> None:
        self.bucket = bucket
        self.in_flight = 0
        self.subscribed = 0
        self.polling = 0

    def is_idle(self, now: float) -> bool:
        return self.in_flight == self.subscribed == self.polling == 0 and self.bucket.is_full(now)


class Admission:
    """Counts requests: of everybody, of a principal, of a tool server, of followers of events.

    Memory is bounded by what is under way and by what came within the time a bucket takes to fill.
    """

    def __init__(self, limits: Limits, *, now: Callable[[], float] = time.monotonic) -> None:
        # Set here for good.
        self._limits = limits
        self._now = now
        # Counters, each raised by the method that admits and lowered by the one that leaves.
        self._in_flight = 0
        self._subscribed = 0
        self._of_server: dict[str, int] = {}
        # By tenant and principal; `_new_load` removes the idle ones when there are this many.
        self._loads: dict[tuple[str, str], _PrincipalLoad] = {}
        self._sweep_at = PRINCIPALS_REMEMBERED

    @property
    def in_flight(self) -> int:
        """Requests being answered, without those that follow events."""
        return self._in_flight

    @property
    def subscribed(self) -> int:
        return self._subscribed

    def begin(self) -> None:
        """Count a request before anything of it is looked at; GatewayBusy when the gateway is full."""
        if self._in_flight >= self._limits.in_flight:
            raise GatewayBusy("the gateway has as many requests in flight as it takes", expected=self._limits.in_flight)
        self._in_flight += 1

    def end(self) -> None:
        self._in_flight -= 1

    def enter(self, principal: Principal) -> _PrincipalLoad:
        """Count one request of a principal: its rate, then what it has in flight. `leave` gives the place back."""
        load = self._paid(principal)
        if load.in_flight >= self._limits.in_flight_per_principal:
            raise TooManyInFlight("too many requests in flight", expected=self._limits.in_flight_per_principal)
        load.in_flight += 1
        return load

    def leave(self, load: _PrincipalLoad) -> None:
        load.in_flight -= 1

    def pass_by(self, principal: Principal) -> None:
        """Count one request of a principal by its rate alone: what is short, and must not wait behind what is long."""
        self._paid(principal)

    @contextmanager
    def subscription(self, principal: Principal) -> Iterator[None]:
        """A request that follows events: counted apart, because it stays; its place among requests is free then."""
        load = self._paid(principal)
        if load.subscribed >= self._limits.event_subscribers:
            raise TooManyInFlight("too many streams of events open", expected=self._limits.event_subscribers)
        self.stay()
        load.subscribed += 1
        try:
            yield
        finally:
            load.subscribed -= 1
            self.stay_no_longer()

    def enter_poll(self, principal: Principal) -> _PrincipalLoad:
        """A worker that waits for runs: counted apart likewise, so that it takes no place from what it does then.
        `leave_poll` gives the place back."""
        load = self._paid(principal)
        if load.polling >= self._limits.waiting_workers:
            raise TooManyInFlight("too many workers wait for runs", expected=self._limits.waiting_workers)
        self.stay()
        load.polling += 1
        return load

    def leave_poll(self, load: _PrincipalLoad) -> None:
        load.polling -= 1
        self.stay_no_longer()

    def stay(self) -> None:
        """Count a request among all who stay, instead of among requests. `stay_no_longer` counts it there again."""
        if self._subscribed >= self._limits.in_flight:
            raise GatewayBusy("the gateway has as many streams of events and waiting workers as it takes")
        self._subscribed += 1
        self._in_flight -= 1

    def stay_no_longer(self) -> None:
        self._subscribed -= 1
        self._in_flight += 1

    def enter_server(self, server_id: str, in_flight_max: int, *, at_work: int = 0) -> None:
        """Count one call for a tool server; GatewayBusy when its load is full. `leave_server` gives the place back.
        `at_work`: how many of its calls are being executed, whether or not a caller waits for them."""
        waiting = self._of_server.get(server_id, 0)
        if max(waiting, at_work) >= in_flight_max:
            raise GatewayBusy("the tool server's load is full", expected=f"at most {in_flight_max} calls in flight")
        self._of_server[server_id] = waiting + 1

    def leave_server(self, server_id: str) -> None:
        left = self._of_server[server_id] - 1
        if left:
            self._of_server[server_id] = left
        else:
            del self._of_server[server_id]

    def _paid(self, principal: Principal) -> _PrincipalLoad:
        now = self._now()
        key = (principal.tenant, principal.principal_id)
        load = self._loads.get(key)
        if load is None:
            load = self._new_load(key, now)
        if not load.bucket.take(now):
            raise RateLimited(
                "too many requests",
                expected=f"{self._limits.requests_per_second} a second, {self._limits.burst} at once",
                retry_after_s=load.bucket.wait_s(),
            )
        return load

    def _new_load(self, key: tuple[str, str], now: float) -> _PrincipalLoad:
        if len(self._loads) >= self._sweep_at:
            self._loads = {known: load for known, load in self._loads.items() if not load.is_idle(now)}
            # Sweep again only when the table has doubled: then the sweep costs each new principal a constant.
            self._sweep_at = max(PRINCIPALS_REMEMBERED, 2 * len(self._loads))
        bucket = TokenBucket(self._limits.requests_per_second, self._limits.burst, now)
        load = self._loads[key] = _PrincipalLoad(bucket)
        return load
