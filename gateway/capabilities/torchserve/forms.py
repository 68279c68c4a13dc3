"""The bodies of TorchServe's inference API, which reach a handler as they are and return as it likes. Pure.

A handler's response is the value of the only output, or an object with the values of all of them. Scores of
classes with labels become `{label: score}`, as TorchServe's image classifier returns them.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.errors import CURL_DEFAULT_TYPE
from gateway.inference.body_type import begins_as_json, recognize_body
from gateway.media_types import JSON, OCTET_STREAM, UTF8_TEXT
from gateway.tensors.json_body import decode_b64_objects, list_json_parts, parse_json_body
from gateway.tensors.outputs import (
    EncodedBody,
    InferResult,
    dump_json,
    encode_raw_result,
    output_to_json,
)
from gateway.tensors.payload import Payload, PayloadLimits
from gateway.tensors.signature import Signature

IMAGE_CLASSIFIER_CLASSES: Final = 5


def recognize_body_type(body: bytes, content_type: str, signature: Signature) -> str:
    """Return the type of a body that was sent with a generic one. Raises `UnsupportedBody`.

    A file for a model that takes only BYTES is taken as it is, even if it contains JSON.
    """
    is_from_curl = content_type.startswith(CURL_DEFAULT_TYPE)
    if begins_as_json(body) and (is_from_curl or not signature.takes_bytes_alone):
        return JSON
    if signature.takes_bytes_alone and not is_from_curl:
        return OCTET_STREAM
    return recognize_body(body, content_type, signature)


def parse_prediction_body(
    body: bytes, signature: Signature, limits: PayloadLimits
) -> list[Payload]:
    """Decode `{name: value, …}`, or a value for the only input. Raises `MalformedRequest`.

    The key of a single value may be any, such as the `data` that TorchServe's handlers read.
    """
    return [Payload(list_json_parts(decode_b64_objects(parse_json_body(body))))]


def choose_class_count(signature: Signature) -> int:
    """Return the number of classes to ask for; 0 unless the only output has labels."""
    outputs = list(signature.outputs.values())
    has_labels = len(outputs) == 1 and outputs[0].has_class_labels
    return IMAGE_CLASSIFIER_CLASSES if has_labels else 0


def encode_prediction(result: InferResult) -> EncodedBody:
    if len(result.arrays) != 1:
        values = {name: output_value(result, name) for name in result.arrays}
        return EncodedBody(dump_json(values), JSON)
    (name,) = result.arrays
    array = result.get_array(name)
    tensor = result.signature.outputs.get(name)
    if array.dtype.kind == "O" and array.size == 1 and not result.has_classifications:
        content_type = tensor.content_type if tensor is not None else ""
        return encode_raw_result(result, content_type or UTF8_TEXT)
    return EncodedBody(dump_json(output_value(result, name)), JSON)


def output_value(result: InferResult, name: str) -> Any:
    value = output_to_json(result, name)
    return label_scores(value) if result.has_classifications else value


def label_scores(value: Any) -> Any:
    """Replace each list of classes by `{label: score}`."""
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(each, dict) and "score" in each for each in value):
        return {each.get("label") or str(each["index"]): each["score"] for each in value}
    return [label_scores(each) for each in value]
