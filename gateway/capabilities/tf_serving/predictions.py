"""The bodies of `:predict`. Pure.

Rows: `{"instances": [value or {name: value}, …]}` → `{"predictions": […]}`, one value per instance.
Columns: `{"inputs": value or {name: value}}` → `{"outputs": …}`, with the batch dimension in each.
"""

from __future__ import annotations

from typing import Any

from gateway.errors import InputMismatch, MalformedRequest, ModelFault
from gateway.media_types import JSON
from gateway.messages import join_names, quote_text
from gateway.tensors.inputs import ParsedJson, check_row_count
from gateway.tensors.json_body import decode_b64_objects, list_json_parts, parse_json_body
from gateway.tensors.outputs import EncodedBody, InferResult, dump_json, output_to_json
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import Signature

KNOWN_PREDICT_KEYS = {"instances", "inputs", "signature_name", "parameters", "id"}


def parse_predict_body(body: bytes, signature: Signature, limits: PayloadLimits) -> ParsedJson:
    """Rows are one inference if the model has a batch dimension; otherwise, each row is one inference.

    Raises `MalformedRequest`, `InputMismatch` or `TooLarge`.
    """
    rows, columns = parse_rows_or_columns(body)
    if rows is None:
        payload = Payload(list_json_parts(decode_b64_objects(columns)))
        return ParsedJson([payload], encode_output_columns)
    # Before anything is built for each row.
    check_row_count(signature, len(rows), limits)
    rows = decode_b64_objects(rows)
    if signature.has_batch_dimension:
        return ParsedJson([payload_from_rows(rows)], encode_predictions)
    return ParsedJson([Payload(list_json_parts(row)) for row in rows], encode_predictions)


def parse_rows_or_columns(body: bytes) -> tuple[list[Any] | None, Any]:
    """Return the instances and None, or None and the columns, as JSON values. Raises `MalformedRequest`."""
    document = parse_json_body(body)
    if not isinstance(document, dict) or ("instances" in document) == ("inputs" in document):
        raise MalformedRequest('the body must be an object with either "instances" or "inputs"')
    if unknown := document.keys() - KNOWN_PREDICT_KEYS:
        raise MalformedRequest(
            f"unknown key '{min(unknown)}' in the body; valid keys are "
            f"{join_names(sorted(KNOWN_PREDICT_KEYS))}"
        )
    if "inputs" in document:
        return None, document["inputs"]
    instances = document["instances"]
    if not isinstance(instances, list) or not instances:
        raise MalformedRequest('"instances" must be a non-empty list')
    return instances, None


def payload_from_rows(instances: list[Any]) -> Payload:
    """Return each input's values of all instances as a batch. Raises `InputMismatch`."""
    if dict not in map(type, instances):
        return Payload({"": [Part(instance, JSON) for instance in instances]}, is_stacked=True)
    rows = [instance if isinstance(instance, dict) else {"": instance} for instance in instances]
    names = rows[0].keys()
    different = next((row for row in rows if row.keys() != names), None)
    if different is not None:
        raise InputMismatch(
            f"the instances have different inputs: {join_names(names)} and {join_names(different)}"
        )
    parts = {name: [Part(row[name], JSON) for row in rows] for name in names}
    return Payload(parts, is_stacked=True)


def encode_predictions(results: list[InferResult]) -> EncodedBody:
    rows: list[Any] = []
    for result in results:
        names = list(result.arrays)
        if not names:
            raise ModelFault("the model returned no outputs")
        columns = [get_output_column(result, name) for name in names]
        if len(names) == 1:
            rows += columns[0]
        else:
            rows += (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    return EncodedBody(dump_json({"predictions": rows}), JSON)


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


def encode_output_columns(results: list[InferResult]) -> EncodedBody:
    (result,) = results
    values = {name: output_to_json(result, name) for name in result.arrays}
    outputs = next(iter(values.values())) if len(values) == 1 else values
    return EncodedBody(dump_json({"outputs": outputs}), JSON)
