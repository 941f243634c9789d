"""`tga serve`: the gateway over HTTP, and all that it does by itself, until it is told to stop.

By itself it recovers what has no living executor, lets requests expire, reads on in the system streams, follows the
policy file, announces what waits and sequences the log. Each of these is a task of its own: one that fails says so,
tries again, and stops none of the others. The store being away is no reason to end.

It ends on SIGINT or SIGTERM: nothing new is taken, what is in flight is answered, what still runs is finished or left
to recovery. A second signal ends it at once, which loses nothing that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final

from rich.console import Console

from app.api.protocol import BoundedProtocol
from app.api.server import serve_http
from app.cli.context import Gateway
from app.cli.policy import live_misfits
from app.cli.recovery import tell
from app.core.digest import Digest
from app.core.errors import ConcurrentExecution, TgaError
from app.core.limits import CONNECTIONS_MAX, DESCRIPTORS_RESERVED, LOG_ROUND_MS, SWEEP_EVERY_MS
from app.domain.system.policies import record_policy
from app.mcp_server.server import PATH as MCP_PATH
from app.memory import spare_what_is_loaded
from app.settings import Settings

output = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger("tga")

OnListening = Callable[[str], Awaitable[None]]
_POLICY_EVERY_MS: Final = 1_000
_SYSTEM_EVERY_MS: Final = 1_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def serve(gateway: Gateway, settings: Settings, *, on_listening: OnListening | None = None) -> bool:
    """Until a signal. `on_listening` is told the address once requests are taken; what it raises ends the gateway."""
    _log_to_stderr()
    spare_what_is_loaded()
    descriptors = _raise_descriptors()
    stopping = gateway.edge.stopping
    own_work = OwnWork(gateway)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with _stopped_by_signals(stopping):
        serving = asyncio.create_task(_serve_http(gateway, settings, listening, descriptors))
        tasks = [asyncio.create_task(work) for work in own_work.all()]
        tasks.append(asyncio.create_task(_greet(listening, settings, on_listening)))
        try:
            await _until_the_end(serving, tasks[-1])
        finally:
            stopping.set()
            # The edge first: what it has taken may still need what works behind it.
            ended = await asyncio.gather(serving, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    output.print("Stopped taking requests; finishing what is under way.")
    return True


async def _serve_http(gateway: Gateway, settings: Settings, listening: asyncio.Future[str], descriptors: int) -> None:
    class Protocol(BoundedProtocol):
        connections_max = connections_within(
            descriptors, dispatching=sum(server.max_concurrency for server in gateway.registry.servers())
        )

    def on_ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        listening.set_result(f"http://{shown}:{port}")

    mounted = {MCP_PATH: gateway.mcp}
    await serve_http(
        gateway.edge, host=settings.host, port=settings.port, on_ready=on_ready, protocol=Protocol, mounted=mounted
    )


def connections_within(descriptors: int, *, dispatching: int) -> int:
    """How many connections clients may hold, so that dispatch, the database and files always find descriptors.

    A quarter stays free for what is accepted and refused in the same moment. Where there are too few descriptors for
    all this, half of them.
    """
    left = max(descriptors - DESCRIPTORS_RESERVED - dispatching, descriptors // 2)
    return min(CONNECTIONS_MAX, left * 3 // 4)


def _raise_descriptors() -> int:
    """As many as the system lets us have; the usual soft limit is far below that. Children are started before this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # some systems name no bound and have one
        return soft
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


async def _until_the_end(serving: asyncio.Task[None], greeting: asyncio.Task[None]) -> None:
    """Until the server has ended, or greeting has failed."""
    await asyncio.wait({serving, greeting}, return_when=asyncio.FIRST_COMPLETED)
    if greeting.done() and not greeting.cancelled():
        greeting.result()
    if not serving.done():
        await asyncio.wait({serving})


async def _greet(listening: asyncio.Future[str], settings: Settings, on_listening: OnListening | None) -> None:
    url = await listening
    output.print(f"Listening on [bold]{url}[/]  (API: {url}/docs)")
    output.print(f"The administrator's key is in {settings.admin_key_file}: Authorization: Bearer <key>", markup=False)
    if on_listening is not None:
        await on_listening(url)


class OwnWork:
    """What the gateway does without being asked."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stopping = gateway.edge.stopping
        self._reported: set[str] = set()
        self._recorded_policy: Digest = gateway.policy.digest
        self._away: set[str] = set()
        self._warned: set[str] = set()
        self._fitted: object = None

    def all(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self.repeat("recovery", self.recover, SWEEP_EVERY_MS),
            self.repeat("expiry", self.expire, SWEEP_EVERY_MS),
            self.repeat("system streams", self._gateway.system.refresh_all, _SYSTEM_EVERY_MS),
            self.repeat("policy", self.follow_policy, _POLICY_EVERY_MS),
            self.repeat("webhooks", self._gateway.webhooks.run, SWEEP_EVERY_MS),
            self.repeat("the log", self._gateway.sequencer.run, LOG_ROUND_MS),
        ]

    async def repeat(self, name: str, work: Callable[[], Awaitable[object]], every_ms: int) -> None:
        """Again and again until the gateway stops. However it fails, it is tried again; an outage is told of once."""
        while not self._stopping.is_set():
            try:
                await work()
            except TgaError as error:
                if name not in self._away:
                    self._away.add(name)
                    logger.warning("%s waits: %s", name, error)
            except Exception:
                logger.exception("a defect in the gateway's %s; it goes on", name)
            else:
                if name in self._away:
                    self._away.discard(name)
                    logger.warning("%s goes on", name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), timeout=every_ms / 1000)

    async def recover(self) -> None:
        async with contextlib.aclosing(self._gateway.runtime.recover_all()) as sweep:
            async for result in sweep:
                # One that cannot be recovered is told of once, not in every sweep.
                if not isinstance(result.error, ConcurrentExecution) and result.trace_id not in self._reported:
                    tell(result, as_json=False)
                if result.error is not None:
                    self._reported.add(result.trace_id)
                if self._stopping.is_set():
                    break

    async def expire(self) -> None:
        expired = await self._gateway.runtime.expire_all()
        if expired:
            output.print(f"{expired} waited for a person for too long: denied.")

    def _warn_of_policy(self) -> None:
        """Each warning once for each policy. Tools come and go with their servers, so rules are compared with them
        again whenever they are others."""
        policy, registry = self._gateway.policy.policy, self._gateway.registry
        fitted = (policy.digest, registry.tools(), [s.connection and s.connection.state for s in registry.servers()])
        if fitted == self._fitted:
            return
        self._fitted = fitted
        for warning in (*policy.warnings, *live_misfits(policy, registry)):
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("policy: %s", warning)

    async def follow_policy(self) -> None:
        """A new policy is on the record as soon as it decides; if the store is away, as soon as it is back: until then
        nothing that it decided can be stored either."""
        policy = self._gateway.policy
        found = await policy.refresh()
        if found is not None and found.error is not None:
            logger.error("the policy file cannot be used, and the policy before it stays in force: %s", found.error)
        elif found is not None:
            output.print(f"The policy file was read again: {found.digest} decides now.")
            self._warned, self._fitted = set(), None
        self._warn_of_policy()
        if policy.digest != self._recorded_policy:
            digest, text = policy.digest, policy.text
            await record_policy(self._gateway.system, self._gateway.clock, digest, text)
            self._recorded_policy = digest


@contextlib.contextmanager
def _stopped_by_signals(stopping: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        output.print("\nStopping; once more to stop at once.")
        stopping.set()
        remove()

    def remove() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        remove()


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logger.setLevel(logging.INFO)
