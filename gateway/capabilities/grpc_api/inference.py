"""The handler of `ModelInfer`: rights, checks, slot, Triton, response."""

from __future__ import annotations

from time import perf_counter

from gateway.callers import RIGHT_TO_INFER
from gateway.capabilities.grpc_api.call import IncomingCall
from gateway.capabilities.grpc_api.infer_request import (
    InferHead,
    change_version,
    read_infer_request,
)
from gateway.capacity.admission import Slot
from gateway.fleet.transports import GrpcBytesCall
from gateway.repository.resolver import ModelTarget
from gateway.services import Services
from gateway.triton.grpc.byte_channel import INFER_METHOD
from gateway.triton.inference import find_outputs_without_classes
from gateway.triton.request_target import RequestTarget


async def serve_infer(call: IncomingCall) -> bytes:
    services = call.services
    timeout_s = call.find_timeout_s()
    started_at = perf_counter()
    metadata = call.select_metadata()
    message = await call.read_message(timeout_s)
    head = read_infer_request(message)
    target = call.resolve(RIGHT_TO_INFER, head.model, head.version).with_sequence(head.step)
    model = target.model
    version = target.version
    remaining_s = timeout_s - (perf_counter() - started_at)
    try:
        remaining_s = await services.dispatcher.wait_for_model(model, version, remaining_s)
        deadline = perf_counter() + remaining_s
        if head.class_outputs:
            await check_classification(services, target, head)
        with Slot(services.admission, model, call.info) as slot:
            if not slot.try_acquire():
                await slot.acquire(deadline - perf_counter())
            request = GrpcBytesCall(
                build_upstream_target(call, target, head),
                INFER_METHOD,
                change_version(message, head.version, version),
                metadata,
            )
            return await services.dispatcher.send(request, deadline - perf_counter())
    finally:
        services.record_model(call.info, model, target.served_version)


def build_upstream_target(
    call: IncomingCall, target: ModelTarget, head: InferHead
) -> RequestTarget:
    return RequestTarget(
        target.model,
        target.version,
        call.info.timeout_s,
        sequence_step=head.step,
        can_activate=True,
        fallback=target.choice,
    )


async def check_classification(services: Services, target: ModelTarget, head: InferHead) -> None:
    """Check that all outputs can be classified: otherwise Triton divides by 0. Raises `InputMismatch`."""
    signature = await services.signatures.get_signature(target.model, target.version)
    find_outputs_without_classes(signature, head.class_outputs)
