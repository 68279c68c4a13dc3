"""Decoding of a complete body to input tensors, in one call that a worker process can run. Pure."""

from __future__ import annotations

from gateway.errors import TooLarge
from gateway.media_types import JSON, MULTIPART
from gateway.tensors import kserve_v1
from gateway.tensors.codecs import find_codec, read_single_value
from gateway.tensors.form import MultipartForm
from gateway.tensors.images import ImageLimits
from gateway.tensors.inputs import InferInputs, to_inputs
from gateway.tensors.json_body import check_json_memory
from gateway.tensors.media_type import parse_content_type
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import Signature

# Each instance of such a request is an inference of its own.
MAX_UNBATCHED_INSTANCES = 1000
FEED_CHUNK_BYTES = 64 << 10


def read_payload(body: bytes, content_type: str, limits: PayloadLimits) -> Payload:
    """Decode a complete body. Raises `MalformedRequest`, `UnsupportedBody` or `TooLarge`."""
    media_type, parameters = parse_content_type(content_type)
    if media_type == MULTIPART:
        form = MultipartForm(content_type, limits)
        for start in range(0, len(body), FEED_CHUNK_BYTES):
            form.feed(body[start : start + FEED_CHUNK_BYTES])
        return form.build_payload()
    codec = find_codec(media_type)
    if codec is not None and codec.read_payload is not None:
        return codec.read_payload(body, limits)
    value = read_single_value(body, media_type, parameters, content_type)
    return Payload({"": [Part(value, media_type)]})


def decode_body(
    body: bytes,
    content_type: str,
    signature: Signature,
    limits: PayloadLimits,
    image_limits: ImageLimits,
) -> tuple[Payload, InferInputs]:
    """Return the payload without its parts, and the input tensors.

    Raises `MalformedRequest`, `UnsupportedBody`, `InputMismatch`, `BadImage` or `TooLarge`.
    """
    if parse_content_type(content_type)[0] == JSON:
        check_json_memory(body, limits)
    return decode_payload(read_payload(body, content_type, limits), signature, image_limits)


def decode_form(
    form: MultipartForm, signature: Signature, limits: PayloadLimits, image_limits: ImageLimits
) -> tuple[Payload, InferInputs]:
    form.check_json_memory(limits)
    return decode_payload(form.build_payload(), signature, image_limits)


def decode_payload(
    payload: Payload, signature: Signature, image_limits: ImageLimits
) -> tuple[Payload, InferInputs]:
    inputs = to_inputs(payload, signature, image_limits)
    return payload._replace(parts={}), inputs


def parse_predict_body(
    body: bytes, signature: Signature, limits: PayloadLimits
) -> tuple[bool, list[Payload]]:
    """Return whether the body of `:predict` has columns, and one payload per inference.

    Rows are one inference if the model has a batch dimension; otherwise, each row is one inference.
    """
    rows, columns = kserve_v1.parse_rows_or_columns(body, limits)
    if rows is None:
        return True, [kserve_v1.payload_from_columns(columns)]
    if signature.has_batch_dimension:
        return False, [kserve_v1.payload_from_rows(rows)]
    if len(rows) > MAX_UNBATCHED_INSTANCES:
        raise TooLarge(
            f"the model has no batch dimension, so a request may have at most {MAX_UNBATCHED_INSTANCES} "
            f"instances; got {len(rows)}"
        )
    return False, [kserve_v1.payload_from_columns(row) for row in rows]


def decode_predict_body(
    body: bytes, signature: Signature, limits: PayloadLimits, image_limits: ImageLimits
) -> tuple[bool, list[InferInputs]]:
    check_json_memory(body, limits)
    is_columns, payloads = parse_predict_body(body, signature, limits)
    return is_columns, [to_inputs(payload, signature, image_limits) for payload in payloads]
