"""An inference in Triton's binary extension, with tritonclient's own encoding and none of its I/O."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from gateway.errors import BadUpstream, DoesNotFit, quoted
from gateway.tensors.signature import Signature
from gateway.triton.http import Headers, Reply

# What tritonclient lets escape when an answer is not one.
UNREADABLE = (
    RecursionError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    struct.error,
    InferenceServerException,
)
# Parameters that tritonclient passes on by an argument of their own.
ARGUMENTS = ("sequence_id", "sequence_start", "sequence_end", "priority")


def encoded(
    signature: Signature,
    arrays: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
    *,
    request_id: str,
    timeout_us: int,
) -> tuple[Headers, bytes]:
    """Headers and body of `POST /v2/models/M/infer` (Binary Tensor Data Extension).

    `classification` among the parameters asks for that many classes of each output.
    """
    inputs = []
    for name, array in arrays.items():
        tensor = InferInput(name, list(array.shape), signature.inputs[name].datatype.name)
        inputs.append(tensor.set_data_from_numpy(array, binary_data=True))
    custom = {key: value for key, value in parameters.items() if key not in ARGUMENTS}
    classes = class_count(custom.pop("classification", 0))
    named = outputs or (signature.outputs if classes else ())
    requested = [InferRequestedOutput(name, True, class_count=classes) for name in named]
    try:
        body, header_length = InferenceServerClient.generate_request_body(
            inputs,
            outputs=requested,
            request_id=request_id,
            timeout=microseconds(custom.pop("timeout", timeout_us)),
            parameters=custom or None,
            **{key: parameters[key] for key in ARGUMENTS if key in parameters},
        )
    except InferenceServerException as exc:
        raise DoesNotFit(f"the parameters do not fit: {exc.message()}") from exc
    headers = [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
    ]
    if header_length is not None:
        headers.append((b"inference-header-content-length", b"%d" % header_length))
    return headers, body


def class_count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise DoesNotFit(f"the parameter 'classification' takes a count, not {quoted(str(value))}")


def microseconds(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise DoesNotFit(f"the parameter 'timeout' takes microseconds, not {quoted(str(value))}")


def decoded(reply: Reply) -> tuple[dict[str, np.ndarray], str]:
    """The outputs by name, and the version that answered. Raises `BadUpstream`."""
    length = reply.header(b"inference-header-content-length")
    try:
        result = InferResult.from_response_body(
            reply.body, header_length=int(length) if length else None
        )
        response = result.get_response()
        arrays = {
            entry["name"]: result.as_numpy(entry["name"]) for entry in response.get("outputs", ())
        }
    except UNREADABLE as exc:
        raise BadUpstream("the replica's answer to an inference cannot be read") from exc
    return arrays, str(response.get("model_version", ""))
