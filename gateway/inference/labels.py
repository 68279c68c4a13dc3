"""Requests of `/v1` whose version a label decided, and their copies for a shadow version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from gateway.errors import ModelNotReady, UnknownModel
from gateway.fleet.inference import InferenceService
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import HttpCall, prepare_http_infer
from gateway.http_client.client import CompleteResponse
from gateway.repository.versions.label_router import ActiveLabel
from gateway.repository.versions.output_comparison import Arrays
from gateway.repository.versions.resolver import LabelledTarget, ModelTarget
from gateway.repository.versions.shadows import DROPPED, ShadowCopy, ShadowRunner
from gateway.tensors.outputs import InferResult
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature
from gateway.triton.inference import InferRequest, decode_http_response
from gateway.version_labels import Shadow


async def read_signature(
    signatures: SignatureCache,
    target: ModelTarget,
    label: LabelledTarget | None,
    step: SequenceStep | None,
) -> Signature:
    """Return the signature of the target, or if it was unloaded, of another version of a split."""
    try:
        return await signatures.get_signature(*target)
    except (ModelNotReady, UnknownModel):
        version = "" if label is None else label.choose_other_version(step)
        if not version:
            raise
    return await signatures.get_signature(target.model, version)


async def infer_with_label(
    inference: InferenceService, label: LabelledTarget, request: InferRequest
) -> InferResult:
    """Run an inference; if Triton refuses a version of a split that was unloaded, on another one."""
    try:
        return await inference.infer(request)
    except (ModelNotReady, UnknownModel):
        version = label.choose_other_version(request.target.sequence_step)
        if not version or request.inputs.exceeds(request.signature.max_batch_size):
            raise
    return await inference.infer(request._replace(target=request.target._replace(version=version)))


def copy_request(
    runner: ShadowRunner, label: ActiveLabel, request: InferRequest, result: InferResult
) -> Iterator[ShadowCopy]:
    """Yield the copy of a request, if it is one that the label's shadow gets.

    Sequences are never copied. A batch that was cut, and a large request, are dropped.
    """
    if request.target.sequence_step is not None or (shadow := runner.choose_shadow(label)) is None:
        return
    inputs = request.inputs
    size_bytes = sum(array.nbytes for array in inputs.arrays.values())
    if inputs.exceeds(request.signature.max_batch_size) or size_bytes > runner.max_bytes:
        runner.count_result(label, shadow, DROPPED)
        return
    yield ShadowCopy(
        label,
        shadow,
        request.request_id,
        request.target.timeout_s,
        max(size_bytes, result.size_bytes),
        partial(build_shadow_call, request, shadow),
        partial(return_outputs, result),
        read_shadow_outputs,
    )


async def build_shadow_call(request: InferRequest, shadow: Shadow) -> HttpCall:
    target = request.target._replace(version=shadow.version)
    deadline = asyncio.get_running_loop().time() + target.timeout_s
    return await prepare_http_infer(request._replace(target=target, deadline=deadline), [])


async def return_outputs(result: InferResult) -> Arrays:
    return result.arrays


async def read_shadow_outputs(reply: CompleteResponse) -> Arrays:
    return (await decode_http_response(reply)).outputs
