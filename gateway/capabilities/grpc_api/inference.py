"""The handler of `ModelInfer`: rights, checks, slot, Triton, response."""

from __future__ import annotations

from time import perf_counter

from gateway.callers import Right
from gateway.capabilities.grpc_api.call import IncomingCall
from gateway.capabilities.grpc_api.infer_request import InferHead, read_infer_request, set_version
from gateway.fleet.transports import GrpcBytesCall
from gateway.repository.versions.resolver import ModelTarget, with_sequence
from gateway.services import Services
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.byte_channel import INFER_METHOD
from gateway.triton.inference import find_outputs_without_classes


async def serve_infer(call: IncomingCall) -> bytes:
    services, timeout_s = call.services, call.find_timeout_s()
    started_at = perf_counter()
    metadata = call.select_metadata()
    message = await call.read_message(timeout_s)
    head = read_infer_request(message)
    target = with_sequence(call.resolve(Right.infer, head.model, head.version), head.step)
    message = set_version(message, head.version, target.version)
    remaining_s = timeout_s - (perf_counter() - started_at)
    try:
        remaining_s = await services.activate_model(*target, remaining_s)
        deadline = perf_counter() + remaining_s
        await check_classification(services, target, head)
        if not services.admission.try_acquire(target.model):
            remaining_s = deadline - perf_counter()
            await services.admission.acquire(target.model, remaining_s, call.info.caller_name)
        try:
            upstream = RequestTarget(
                *target, call.info.timeout_s, sequence_step=head.step, can_activate=True
            )
            request = GrpcBytesCall(upstream, INFER_METHOD, message, metadata)
            return await services.dispatcher.send(request, deadline - perf_counter())
        finally:
            services.admission.release(target.model, call.info.caller_name)
    finally:
        services.record_model(call.info, *target)


async def check_classification(services: Services, target: ModelTarget, head: InferHead) -> None:
    """Raise `InputMismatch` if an output cannot be classified: Triton would divide by 0."""
    if head.class_outputs:
        signature = await services.signatures.get_signature(*target)
        find_outputs_without_classes(signature, head.class_outputs)
