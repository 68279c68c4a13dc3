"""A whole body and a signature become tensors in one call, which a worker process can be given. Pure."""

from __future__ import annotations

from dataclasses import replace

from gateway.errors import TooLarge
from gateway.tensors import predict
from gateway.tensors.images import ImageLimits
from gateway.tensors.inputs import Inputs, to_inputs
from gateway.tensors.media_type import media_type
from gateway.tensors.payload import JSON, Form, Limits, Payload, check_json_memory, read_payload
from gateway.tensors.signature import Signature

# Instances of a request that are an inference each.
MAX_ROWS = 1000


def decode_body(
    body: bytes,
    content_type: str,
    signature: Signature,
    limits: Limits,
    image_limits: ImageLimits,
) -> tuple[Payload, Inputs]:
    """Return the tensors, and what else the body said.

    Raises `Malformed`, `UnsupportedBody`, `DoesNotFit`, `BadImage` or `TooLarge`.
    """
    if media_type(content_type)[0] == JSON:
        check_json_memory(body, limits)
    return decode_payload(read_payload(body, content_type, limits), signature, image_limits)


def decode_form(
    form: Form, signature: Signature, limits: Limits, image_limits: ImageLimits
) -> tuple[Payload, Inputs]:
    """The same of a form that was fed its whole body."""
    form.check_json_memory(limits)
    return decode_payload(form.payload(), signature, image_limits)


def decode_payload(
    payload: Payload, signature: Signature, image_limits: ImageLimits
) -> tuple[Payload, Inputs]:
    """Return the tensors, and the payload without its parts, which became them."""
    inputs = to_inputs(payload, signature, image_limits)
    return replace(payload, parts={}), inputs


def read_predict(body: bytes, signature: Signature, limits: Limits) -> tuple[bool, list[Payload]]:
    """Return whether the body of `:predict` has columns, and a payload for each inference it needs.

    Rows are one inference where the model has a batch dimension, else one each.
    """
    rows, columns = predict.rows_or_columns(body, limits)
    if rows is None:
        return True, [predict.from_columns(columns)]
    if signature.stackable:
        return False, [predict.from_rows(rows)]
    if len(rows) > MAX_ROWS:
        raise TooLarge(
            f"the model has no batch dimension: a request has at most {MAX_ROWS} instances, "
            f"and this one has {len(rows)}"
        )
    return False, [predict.from_row(row) for row in rows]


def decode_predict(
    body: bytes, signature: Signature, limits: Limits, image_limits: ImageLimits
) -> tuple[bool, list[Inputs]]:
    """The same with the tensors of each inference."""
    check_json_memory(body, limits)
    is_columns, payloads = read_predict(body, signature, limits)
    return is_columns, [to_inputs(payload, signature, image_limits) for payload in payloads]
