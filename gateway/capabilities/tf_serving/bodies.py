"""The bodies of TensorFlow Serving's API: predictions, and the signature of a model. Pure.

Rows: `{"instances": [value or {name: value}, …]}` → `{"predictions": […]}`, one value per instance.
Columns: `{"inputs": value or {name: value}}` → `{"outputs": …}`, with the batch dimension in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import InputMismatch, MalformedRequest, ModelFault
from gateway.media_types import JSON
from gateway.messages import join_names, quote_text
from gateway.tensors.inputs import check_row_count
from gateway.tensors.json_body import decode_b64_objects, list_json_parts, parse_json_body
from gateway.tensors.outputs import EncodedBody, InferResult, dump_json, output_to_json
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import Signature, TensorSpec

# The names of TensorFlow's `DataType`. That of an integer is "DT_" and Triton's.
DTYPES: Final = {
    "FP16": "DT_HALF",
    "BF16": "DT_BFLOAT16",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BYTES": "DT_STRING",
}
KNOWN_PREDICT_KEYS: Final = {"instances", "inputs", "signature_name", "parameters", "id"}


def parse_predict_body(body: bytes, signature: Signature, limits: PayloadLimits) -> list[Payload]:
    """Return one payload for columns, and for rows if the model has a batch dimension; else one for each row.

    Raises `MalformedRequest`, `InputMismatch` or `TooLarge`.
    """
    document = parse_json_body(body)
    if not isinstance(document, dict) or ("instances" in document) == ("inputs" in document):
        raise MalformedRequest('the body must be an object with either "instances" or "inputs"')
    if unknown := document.keys() - KNOWN_PREDICT_KEYS:
        raise MalformedRequest(
            f"unknown key '{min(unknown)}' in the body; valid keys are "
            f"{join_names(sorted(KNOWN_PREDICT_KEYS))}"
        )
    if "inputs" in document:
        return [Payload(list_json_parts(decode_b64_objects(document["inputs"])))]
    instances = document["instances"]
    if not isinstance(instances, list) or not instances:
        raise MalformedRequest('"instances" must be a non-empty list')
    # Before anything is built for each instance.
    check_row_count(signature, len(instances), limits)
    instances = decode_b64_objects(instances)
    if signature.has_batch_dimension:
        return [build_batch_payload(instances)]
    return [Payload(list_json_parts(each), instance_count=1) for each in instances]


def build_batch_payload(instances: list[Any]) -> Payload:
    rows = [instance if isinstance(instance, dict) else {"": instance} for instance in instances]
    names = rows[0].keys()
    different = next((row for row in rows if row.keys() != names), None)
    if different is not None:
        raise InputMismatch(
            f"the instances have different inputs: {join_names(names)} and {join_names(different)}"
        )
    parts = {name: [Part(row[name], JSON) for row in rows] for name in names}
    return Payload(parts, instance_count=len(rows))


def encode_results(results: list[InferResult]) -> EncodedBody:
    """Return a value for each instance, or the outputs with their batch dimension."""
    if results[0].instance_count:
        predictions = [row for result in results for row in list_predictions(result)]
        return EncodedBody(dump_json({"predictions": predictions}), JSON)
    (result,) = results
    values = {name: output_to_json(result, name) for name in result.arrays}
    outputs = next(iter(values.values())) if len(values) == 1 else values
    return EncodedBody(dump_json({"outputs": outputs}), JSON)


def list_predictions(result: InferResult) -> list[Any]:
    names = list(result.arrays)
    if not names:
        raise ModelFault("the model returned no outputs")
    columns = [get_output_column(result, name) for name in names]
    if len(names) == 1:
        return columns[0]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def get_output_column(result: InferResult, name: str) -> list[Any]:
    """Return the output's value for each instance. Raises `ModelFault` if their number differs."""
    value = output_to_json(result, name)
    value = value.tolist() if hasattr(value, "tolist") else value
    if not result.signature.has_batch_dimension:
        return [value]
    if isinstance(value, list) and len(value) == result.instance_count:
        return value
    count = f"{len(value)} values" if isinstance(value, list) else "a single value"
    raise ModelFault(
        f"the model returned {count} for {result.instance_count} instances in output {quote_text(name)}"
    )


def build_model_metadata(signature: Signature) -> dict[str, Any]:
    version = signature.version or next(iter(signature.versions[-1:]), "")
    definition = {
        "inputs": describe_tensors(signature, signature.inputs),
        "outputs": describe_tensors(signature, signature.outputs),
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": signature.model, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": {"serving_default": definition}}},
    }


def describe_tensors(signature: Signature, tensors: Mapping[str, TensorSpec]) -> dict[str, Any]:
    batch = (-1,) if signature.supports_batching else ()
    infos = {}
    for name, tensor in tensors.items():
        datatype = tensor.datatype.name
        sizes = [{"size": str(size), "name": ""} for size in (*batch, *tensor.shape)]
        infos[name] = {
            "name": name,
            "dtype": DTYPES.get(datatype, f"DT_{datatype}"),
            "tensor_shape": {"dim": sizes, "unknown_rank": False},
        }
    return infos
