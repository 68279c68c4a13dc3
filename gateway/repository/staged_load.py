"""Staged loads: one replica after the other, each with a probe request; the first failure stops the load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from gateway.errors import GatewayError, InputMismatch, TooLarge
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import TRANSPORT_ERRORS, request_json, triton_model_path
from gateway.messages import quote_text
from gateway.repository.report import OperationReport, Outcome
from gateway.repository.shared_state import SharedState, StartedLoad
from gateway.triton.json_guard import GUARD_CHUNK_BYTES, JsonGuard
from gateway.triton.request_target import RequestTarget

PROBE_PARAMETER: Final = "gateway.probe"  # in the model's config: the JSON body of an inference
PROBE_TIMEOUT_S: Final = 60.0
MAX_PROBE_BYTES: Final = 1 << 20


class StagedLoadFailed(GatewayError):
    status, code = 502, "STAGED_LOAD_FAILED"

    def __init__(self, report: OperationReport, replica: str, error: GatewayError) -> None:
        loaded = sum(outcome.error is None for outcome in report.outcomes.values())
        super().__init__(
            f"the staged load of model {quote_text(report.model)} stopped at {replica}: {error.detail}; "
            f"the model is loaded on {loaded} of {report.replica_count} replicas, and the others keep what "
            "they had"
        )
        self.report = report.to_dict()


async def run_staged_load(
    pool: ReplicaPool,
    state: SharedState,
    report: OperationReport,
    run_on_replica: Callable[[Replica], Awaitable[None]],
) -> Mapping[Replica, StartedLoad]:
    """Load the model on one replica after the other; those that do not respond are no stages.

    The returned loads stay in progress, so that no gateway repairs these replicas until the caller has
    stored the desired state. Raises `StagedLoadFailed` after the first failure.
    """
    model, staged_loads = report.model, dict[Replica, StartedLoad]()
    replicas = sorted(
        pool.replicas.values(), key=lambda each: (each.health.missed_probes, each.name)
    )
    report.replica_count = len(replicas)
    try:
        for replica in replicas:
            if pool.is_reachable(replica) and pool.is_responsive(replica):
                staged_loads[replica] = await state.begin_load(replica.name, model)
                await run_on_replica(replica)
                error = report.outcomes[replica.name].error
                if error is not None and not isinstance(error, TRANSPORT_ERRORS):
                    # A failed load leaves the previous one in place.
                    await state.end_loads(model, {replica: staged_loads.pop(replica)}, None)
                if pool.is_live(replica) and not pool.is_responsive(replica):
                    continue  # it hangs; the reconciler loads the model when it responds again
                await check_outcome(report, replica)
    except BaseException:
        await state.end_loads(model, staged_loads, "")
        raise
    return staged_loads


async def check_outcome(report: OperationReport, replica: Replica) -> None:
    """Probe the replica if the load succeeded there. Raises `StagedLoadFailed`."""
    outcome = report.outcomes[replica.name]
    if outcome.error is None:
        try:
            await send_probe(replica, report.model)
        except GatewayError as exc:
            outcome = report.outcomes[replica.name] = Outcome(outcome.state, exc)
    if outcome.error is not None:
        raise StagedLoadFailed(report, replica.name, outcome.error)


async def send_probe(replica: Replica, model: str) -> None:
    """Send the inference that the model's config contains, if any, to one replica. Raises its error."""
    path, target = triton_model_path(model), RequestTarget(model, timeout_s=PROBE_TIMEOUT_S)
    body = find_probe(await request_json(replica, target, b"GET", f"{path}/config")).encode()
    if body:
        check_probe(body)
        await request_json(replica, target, b"POST", f"{path}/infer", body)


def check_probe(body: bytes) -> None:
    """Raise the error of a probe that `/v2` would refuse: whoever uploads a config must not crash Triton."""
    if len(body) > MAX_PROBE_BYTES:
        raise TooLarge(f"{PROBE_PARAMETER} can have at most {MAX_PROBE_BYTES} bytes")
    guard = JsonGuard(len(body))
    for start in range(0, len(body), GUARD_CHUNK_BYTES):
        guard.feed(body[start : start + GUARD_CHUNK_BYTES])
    guard.finish()
    if guard.has_classification:
        raise InputMismatch(f"{PROBE_PARAMETER} must not use classification")


def find_probe(config: Any) -> str:
    try:
        return str(config["parameters"][PROBE_PARAMETER]["string_value"])
    except (KeyError, TypeError):
        return ""
