"""A staged load: the model is loaded on one replica after the other, and each must answer a probe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from gateway.errors import GatewayError, InputMismatch, TooLarge
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import TRANSPORT_ERRORS, request_json, triton_model_path
from gateway.messages import quote_text
from gateway.repository.operations import OperationReport, Outcome
from gateway.repository.shared_state import StartedLoads
from gateway.repository.state.loads import UNKNOWN_LOAD
from gateway.triton.json_guard import GUARD_CHUNK_BYTES, JsonGuard
from gateway.triton.request_target import RequestTarget

PROBE_PARAMETER: Final = "gateway.probe"  # config parameter: the JSON body of an inference
PROBE_TIMEOUT_S: Final = 60.0
MAX_PROBE_BYTES: Final = 1 << 20


class StagedLoadFailed(GatewayError):
    status = 502
    code = "STAGED_LOAD_FAILED"

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
    report: OperationReport,
    staged: StartedLoads,
    run_on_replica: Callable[[Replica], Awaitable[None]],
) -> None:
    """Load the model on one replica after the other; replicas that do not respond are left out.

    The loads stay in progress, so that no gateway repairs these replicas until the caller has stored the
    desired state. Raises `StagedLoadFailed` after the first failure.
    """
    replicas = sorted(
        pool.replicas.values(), key=lambda each: (each.health.missed_probes, each.name)
    )
    report.replica_count = len(replicas)
    for replica in replicas:
        if pool.is_reachable(replica) and pool.is_responsive(replica):
            await staged.begin(replica)
            await run_on_replica(replica)
            error = report.outcomes[replica.name].error
            if error is not None and not isinstance(error, TRANSPORT_ERRORS):
                # A failed load leaves the previous one in place.
                await staged.end(replica, None)
            if pool.is_live(replica) and not pool.is_responsive(replica):
                # It hangs, and may have the model or not: it is loaded when it responds again.
                await staged.end(replica, UNKNOWN_LOAD)
            else:
                await check_outcome(report, replica)


async def check_outcome(report: OperationReport, replica: Replica) -> None:
    """Probe the replica if the load succeeded there. Raises `StagedLoadFailed`."""
    outcome = report.outcomes[replica.name]
    if outcome.error is None:
        try:
            await send_probe(replica, report.model)
        except GatewayError as exc:
            outcome = Outcome(outcome.state, exc)
            report.record(replica.name, outcome)
    if outcome.error is not None:
        raise StagedLoadFailed(report, replica.name, outcome.error)


async def send_probe(replica: Replica, model: str) -> None:
    """Send the inference that the model's config contains, if any, to one replica. Raises its error."""
    path = triton_model_path(model)
    target = RequestTarget(model, timeout_s=PROBE_TIMEOUT_S)
    body = find_probe(await request_json(replica, target, b"GET", f"{path}/config")).encode()
    if body:
        check_probe(body)
        await request_json(replica, target, b"POST", f"{path}/infer", body=body)


def check_probe(body: bytes) -> None:
    """Check a probe as `/v2` does, whose errors it raises: an uploaded config must not crash Triton."""
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
