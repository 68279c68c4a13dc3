"""The dialect of TensorFlow Serving's REST API, which KServe calls V1. Pure.

Rows: `{"instances": [value or {name: value}, …]}` → `{"predictions": […]}`, one value per instance.
Columns: `{"inputs": value or {name: value}}` → `{"outputs": …}`, with the batch dimension in each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.errors import InputMismatch, MalformedRequest, ModelFault
from gateway.messages import join_names, quote_text
from gateway.tensors.outputs import EncodedBody, InferResult, dump_json, output_to_json
from gateway.tensors.payload import (
    JSON,
    Part,
    Payload,
    PayloadLimits,
    decode_b64_objects,
    parse_json_body,
)

KNOWN_PREDICT_KEYS = {"instances", "inputs", "signature_name", "parameters", "id"}


def parse_rows_or_columns(body: bytes, limits: PayloadLimits) -> tuple[list[Any] | None, Any]:
    """The instances, or None and the columns. Raises `Malformed`."""
    document = parse_json_body(body)
    if not isinstance(document, dict) or ("instances" in document) == ("inputs" in document):
        raise MalformedRequest('the body must be an object with either "instances" or "inputs"')
    if unknown := document.keys() - KNOWN_PREDICT_KEYS:
        raise MalformedRequest(
            f"the body has the unknown key '{min(unknown)}'; known are "
            f"{join_names(sorted(KNOWN_PREDICT_KEYS))}"
        )
    if "inputs" in document:
        return None, decode_b64_objects(document["inputs"], limits.max_json_depth)
    instances = decode_b64_objects(document["instances"], limits.max_json_depth)
    if not isinstance(instances, list) or not instances:
        raise MalformedRequest('"instances" must be a list of at least one instance')
    return instances, None


def payload_from_rows(instances: list[Any]) -> Payload:
    """Every input's values over the instances, as a batch. Raises `DoesNotFit`."""
    if dict not in map(type, instances):
        return Payload({"": [Part(instance, JSON) for instance in instances]}, is_stacked=True)
    rows = [instance if isinstance(instance, dict) else {"": instance} for instance in instances]
    names = rows[0].keys()
    different = next((row for row in rows if row.keys() != names), None)
    if different is not None:
        raise InputMismatch(
            f"the instances name different inputs: {join_names(names)} and {join_names(different)}"
        )
    parts = {name: [Part(row[name], JSON) for row in rows] for name in names}
    return Payload(parts, is_stacked=True)


def payload_from_row(row: Any) -> Payload:
    """One instance, for a model that has no batch dimension."""
    return payload_from_columns(row)


def payload_from_columns(columns: Any) -> Payload:
    values = columns if isinstance(columns, dict) else {"": columns}
    return Payload({name: [Part(value, JSON)] for name, value in values.items()})


def encode_predictions(results: list[InferResult]) -> EncodedBody:
    """One value per instance; an object of the outputs where there are several."""
    rows: list[Any] = []
    for result in results:
        names = list(result.arrays)
        if not names:
            raise ModelFault("the model answered no output")
        columns = [get_output_column(result, name) for name in names]
        values = columns[0] if len(names) == 1 else map(partial(build_prediction, names), *columns)
        rows.extend(values)
    return encode_json_document({"predictions": rows})


def get_output_column(result: InferResult, name: str) -> list[Any]:
    """The output's value for each instance of this answer."""
    value = to_list(output_to_json(result, name))
    if not result.signature.has_batch_dimension:
        return [value]
    if isinstance(value, list) and len(value) == result.instance_count:
        return value
    count = f"{len(value)} values" if isinstance(value, list) else "a single value"
    raise ModelFault(
        f"the model answered {count} for {result.instance_count} instances in its output {quote_text(name)}"
    )


def build_prediction(names: list[str], *values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def encode_output_columns(result: InferResult) -> EncodedBody:
    values = {name: output_to_json(result, name) for name in result.arrays}
    return encode_json_document(
        {"outputs": next(iter(values.values())) if len(values) == 1 else values}
    )


def to_list(value: Any) -> Any:
    return value if isinstance(value, list) or not hasattr(value, "tolist") else value.tolist()


def encode_json_document(document: dict[str, Any]) -> EncodedBody:
    return EncodedBody(dump_json(document), JSON)
