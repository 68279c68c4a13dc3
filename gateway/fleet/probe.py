"""Probes of the replicas. Nothing else writes the state of a `Replica`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from math import inf
from random import uniform
from time import perf_counter
from typing import Any, Final

import anyio
import orjson

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError
from gateway.fleet.health import FailureShares, HealthState
from gateway.fleet.index import Index, parse_index
from gateway.fleet.replica import NOT_PROBED, Replica, ReplicaAddress
from gateway.http_client.connection import RequestNotSent
from gateway.tasks import TaskSet, cancel_tasks, run_step
from gateway.triton.error_mapping import MAX_METADATA_BYTES

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 1.0
# A replica that answers no liveness probe for this time has stopped reading its index as well.
MAX_SILENCE_S: Final = 3.0
MIN_PROBE_PAUSE_S: Final = 0.05
DOWN_PROBE_INTERVAL_S: Final = 0.2
# Probes of all replicas at once would delay the requests that come with them.
MIN_INTERVAL_SHARE: Final = 0.8
INDEX_PATH: Final = b"/v2/repository/index"
LIVENESS_PATH: Final = b"/v2/health/live"
SLOW_INDEX_TIMEOUT_S: Final = 20.0  # while the replica answers on its liveness path
MAX_INLINE_INDEX_BYTES: Final = 64 << 10  # about a thousand models; more are parsed in a thread
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
SERVED_LATER: Final = "; its models are served as soon as it answers"
START_ADVICE: Final = "; to start a Triton here: triton-gateway up"
PROBE_STATUS_REASONS: Final = {
    403: "Triton restricts its repository API; check GATEWAY_TRITON_RESTRICTED_API"
}


class HealthMonitor:
    """Probes the replicas and writes their state. `on_change` is called when a state or an index changes."""

    def __init__(
        self,
        replicas: Mapping[ReplicaAddress, Replica],
        on_change: Callable[[], None],
        interval_s: float,
        failures: FailureShares,
    ) -> None:
        self._replicas = replicas
        self._on_change = on_change
        self._interval_s = interval_s
        self._failures = failures
        self._loop = asyncio.get_running_loop()
        self._last_round: asyncio.Task[None] | None = None
        # Slow reads of indexes run beside the probes.
        self._slow_index_reads = TaskSet()

    async def probe_periodically(self, replica: Replica) -> None:
        # A cancellation can be lost (see `cancel_tasks`), so a removed replica ends the loop as well.
        while self._replicas.get(replica.address) is replica:
            await run_step("probe", lambda: self._probe_and_wait(replica))

    async def _probe_and_wait(self, replica: Replica) -> None:
        if replica.health.is_down or not replica.index_schedule.is_slow:
            await self.probe(replica)
        elif await self._check_liveness(replica):
            is_due = self._loop.time() >= replica.index_schedule.due_at
            if is_due and not replica.index_lock.locked():
                self._slow_index_reads.start(self.probe(replica))
        await self._wait_for_next_probe(replica)

    async def _wait_for_next_probe(self, replica: Replica) -> None:
        probed_at = self._loop.time()
        pause_s = self._interval_s * uniform(MIN_INTERVAL_SHARE, 1)  # noqa: S311 - not for security
        if replica.health.is_down:
            # A refused connection costs little, and a fast recovery matters.
            pause_s = min(pause_s, DOWN_PROBE_INTERVAL_S)
        # A cancel scope instead of the timer would cost a fifth of the whole probe.
        tick = self._loop.call_later(pause_s, replica.probe_requested.set)
        try:
            await replica.probe_requested.wait()
        finally:
            tick.cancel()
        too_early_s = probed_at + MIN_PROBE_PAUSE_S - self._loop.time()
        if too_early_s > 0:
            await asyncio.sleep(too_early_s)
        replica.probe_requested.clear()

    async def probe_all(self, max_wait_s: float = inf) -> None:
        """Probe the replicas after this call began, and wait for those that answered their last probe.

        Calls that wait at the same time share the probes. After `max_wait_s`, the last indexes have to do.
        """
        with anyio.move_on_after(max_wait_s):
            if (running := self._last_round) is not None and not running.done():
                # The indexes that it reads may be from before this call.
                await asyncio.wait([running])
            if self._last_round is None or self._last_round.done():
                self._last_round = asyncio.create_task(self._probe_answering())
            await asyncio.shield(self._last_round)

    async def _probe_answering(self) -> None:
        answering = [each for each in self._replicas.values() if not each.health.missed_probes]
        await asyncio.gather(*map(self.probe, answering))

    async def close(self) -> None:
        rounds = [] if self._last_round is None else [self._last_round]
        await cancel_tasks([*rounds, *self._slow_index_reads])

    async def probe(self, replica: Replica) -> None:
        """Read the replica's index, which shows that it is alive as well."""
        was_silent = replica.health.missed_probes > 0
        ready_before = replica.index.ready_models
        try:
            async with replica.index_lock:
                if replica.index_schedule.is_slow:
                    await self._request(replica, b"GET", LIVENESS_PATH, PROBE_TIMEOUT_S)
                changed = await self._read_index(replica)
        except GatewayError as exc:
            replica.is_index_valid = replica.is_index_valid and not isinstance(exc, BadUpstream)
            self._record_missed_probe(replica, exc)
        else:
            replica.is_index_valid = True
            # It may be another process that has got the address.
            if was_silent and not ready_before <= replica.index.ready_models:
                self._record_exit(replica)
            self._record_answer(replica, changed=changed)

    async def _read_index(self, replica: Replica) -> bool:
        """Return whether the index changed. Raises `GatewayError`."""
        schedule = replica.index_schedule
        timeout_s = SLOW_INDEX_TIMEOUT_S if schedule.is_slow else PROBE_TIMEOUT_S
        started_at = perf_counter()
        request = self._request(replica, b"POST", INDEX_PATH, timeout_s)
        try:
            body = await (self._wait_while_alive(replica, request) if schedule.is_slow else request)
        except DeadlinePassed:
            replica.index_schedule = schedule.with_timeout(timeout_s)
            raise
        duration_s = perf_counter() - started_at
        replica.index_schedule = schedule.with_read(self._loop.time(), duration_s)
        if body == replica.raw_index:
            return False
        try:
            replica.index = await parse_index_response(body)
        except ValueError as exc:
            raise BadUpstream(str(exc)) from exc
        replica.raw_index = body
        return True

    async def _wait_while_alive(
        self, replica: Replica, request: Coroutine[Any, Any, bytes]
    ) -> bytes:
        """Wait for a slow index. Raises `DeadlinePassed` if the replica stops answering other probes."""
        reading = asyncio.create_task(request)
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=PROBE_TIMEOUT_S)
                if self._loop.time() - replica.answered_at > MAX_SILENCE_S:
                    raise DeadlinePassed(MAX_SILENCE_S)
            return reading.result()
        finally:
            reading.cancel()

    async def _check_liveness(self, replica: Replica) -> bool:
        """Return whether the replica is alive. If its last index is valid, it is reachable then."""
        try:
            await self._request(replica, b"GET", LIVENESS_PATH, PROBE_TIMEOUT_S)
        except GatewayError as exc:
            self._record_missed_probe(replica, exc)
            return False
        # Otherwise only a new index can tell what it serves.
        if replica.is_index_valid and not replica.health.is_down:
            self._record_answer(replica)
        return True

    async def _request(
        self, replica: Replica, method: bytes, path: bytes, timeout_s: float
    ) -> bytes:
        """Return the body of a response on a fresh connection: a stopping Triton still answers on others.

        Raises `GatewayError`.
        """
        response = await replica.http.request(
            method,
            path,
            headers=replica.management_headers,
            timeout_s=timeout_s,
            fresh=True,
            max_bytes=MAX_METADATA_BYTES,
        )
        if response.status != 200:
            reason = PROBE_STATUS_REASONS.get(response.status)
            raise BadUpstream(reason or f"Triton returned status {response.status}")
        replica.answered_at = self._loop.time()
        return response.body

    def mark_unloaded(self, replica: Replica, model: str, version: str) -> None:
        """Something else than the gateways has unloaded the model: the index is outdated, and read again."""
        if replica.index.is_ready(model, version):
            replica.index = replica.index.with_model_unloaded(model, version)
            replica.raw_index = b""
            replica.index_schedule = replica.index_schedule.with_request()
            replica.probe_requested.set()
            self._on_change()

    def report_transport_failure(self, replica: Replica, error: GatewayError) -> None:
        """Note that a request found no Triton, or no connection: a probe tells at once how it is."""
        replica.probe_requested.set()
        if isinstance(error, RequestNotSent) and error.is_refused:
            previous = replica.health.state
            self._record_refusal(replica)
            replica.reason = error.detail
            self._report_state_change(replica, previous)

    def _record_answer(self, replica: Replica, *, changed: bool = False) -> None:
        previous = replica.health
        replica.reason = ""
        if previous.is_down or previous.missed_probes:
            replica.health = previous.with_probe_answer()
            self._report_state_change(replica, previous.state)
            changed = True
        if changed:
            self._on_change()

    def _record_missed_probe(self, replica: Replica, error: GatewayError) -> None:
        previous = replica.health
        if isinstance(error, RequestNotSent) and error.is_refused:
            self._record_refusal(replica)
        else:
            replica.health = previous.with_probe_timeout()
        is_first_probe = replica.reason == NOT_PROBED
        # The message of `DeadlinePassed` gives advice to clients.
        is_late = isinstance(error, DeadlinePassed)
        replica.reason = "no response to a probe in time" if is_late else error.detail
        if is_first_probe:
            warn_of_start(replica, error)
        if replica.health.missed_probes and not previous.missed_probes:
            self._on_change()  # `ReplicaPool.wait_while_responsive` watches the time from now on
        self._report_state_change(replica, previous.state)

    def _record_refusal(self, replica: Replica) -> None:
        if not replica.health.has_exited:
            self._record_exit(replica)
        replica.health = replica.health.with_refusal()

    def _record_exit(self, replica: Replica) -> None:
        replica.exit_count += 1
        self._failures.forget_replica(replica.name)

    def _report_state_change(self, replica: Replica, previous: HealthState) -> None:
        state = replica.health.state
        if state is previous:
            return
        replica.http.keep_alive = state is HealthState.UP
        if state is HealthState.UP:
            log.info("replica %s is UP", replica.address)
        else:
            replica.drop_idle()
            # The next index may come from another process.
            replica.raw_index = b""
            log.warning("replica %s is %s: %s", replica.address, state.name, replica.reason)
        self._on_change()


def warn_of_start(replica: Replica, error: GatewayError) -> None:
    """Name a replica whose first probe fails: its state does not change."""
    advice = ""
    if isinstance(error, RequestNotSent):
        is_local = replica.address.host in LOCAL_HOSTS
        advice = SERVED_LATER + (START_ADVICE if is_local else "")
    log.warning("replica %s is DOWN: %s%s", replica.address, replica.reason, advice)


async def parse_index_response(body: bytes) -> Index:
    """Parse a response of Triton, a large one in a thread. Raises `ValueError` if it is invalid."""
    if len(body) <= MAX_INLINE_INDEX_BYTES:
        return parse_index(orjson.loads(body))
    return await asyncio.to_thread(lambda: parse_index(orjson.loads(body)))
