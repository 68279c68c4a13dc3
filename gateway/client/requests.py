"""Inference requests for inputs, single or batched, and records of their responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.client.api import decode_json_object
from gateway.client.infer_client import InferClient, NoResponse, find_failure, is_ndjson_stream
from gateway.client.inputs import Input, InputBody
from gateway.client.records import Record
from gateway.http_client.client import CompleteResponse
from gateway.media_types import JSON, OCTET_STREAM, UTF8_TEXT

# A single input of a batch may have caused these: every input is then sent alone.
BATCH_SPLIT_STATUSES: Final = (400, 413, 415, 422, 500)


def is_batchable(body: InputBody) -> bool:
    if body.content_type != UTF8_TEXT:
        return body.content_type == OCTET_STREAM or body.content_type.startswith("image/")
    try:
        body.data.decode()
    except UnicodeDecodeError:
        return False  # it is sent alone, and the gateway reports the error
    return True


def combine_bodies(bodies: Sequence[InputBody]) -> InputBody:
    """Return a JSON request with a list of values: texts, and other data as base64."""
    values = [encode_batch_value(body) for body in bodies]
    return InputBody(JSON, orjson.dumps({"inputs": values}))


def encode_batch_value(body: InputBody) -> Any:
    if body.content_type == UTF8_TEXT:
        return body.data.decode()
    return {"b64": base64.b64encode(body.data).decode()}


async def infer_group(client: InferClient, group: Sequence[Input]) -> list[Record]:
    """Send the inputs in one request, or one for each; return a record for each input, in order.

    Raises `GatewayUnreachable`.
    """
    records: dict[int, Record] = {}
    bodies: dict[int, InputBody] = {}
    for number, input_ in enumerate(group):
        try:
            bodies[number] = await input_.read_async()
        except OSError as exc:
            message = f"the file cannot be read: {exc.strerror}"
            records[number] = Record(input_.name, error=message, code="UNREADABLE")
    batchable = [number for number, body in bodies.items() if is_batchable(body)]
    if len(batchable) > 1:
        names = [group[number].name for number in batchable]
        batch = combine_bodies([bodies[number] for number in batchable])
        batch_records = await infer_inputs(client, names, batch)
        records |= zip(batchable, batch_records, strict=False)
    for number, body in bodies.items():
        if number not in records:
            (records[number],) = await infer_inputs(client, [group[number].name], body)
    return [records[number] for number in range(len(group))]


async def infer_inputs(client: InferClient, names: Sequence[str], body: InputBody) -> list[Record]:
    """Return no records if each input must be sent alone, to find the one that failed."""
    try:
        reply = await client.infer(body.content_type, body.data)
        if len(names) > 1 and reply.status in BATCH_SPLIT_STATUSES:
            return []
        if failure := find_failure(reply):
            return [Record(name, error=failure.message, code=failure.code) for name in names]
        outputs = split_outputs(reply, len(names))
    except NoResponse as exc:
        return [Record(name, error=str(exc), code="NO_ANSWER") for name in names]
    return [Record(name, part) for name, part in zip(names, outputs, strict=True)]


def collect_stream_outputs(reply: CompleteResponse) -> dict[str, list[Any]]:
    """Return each output's values over all responses, in order. Raises `NoResponse`."""
    outputs: dict[str, list[Any]] = {}
    for line in reply.body.splitlines():
        for name, value in decode_outputs(line).items():
            outputs.setdefault(name, []).append(value)
    return outputs


def decode_outputs(body: bytes) -> dict[str, Any]:
    outputs = decode_json_object(body).get("outputs")
    if not isinstance(outputs, dict):
        raise NoResponse("the response has no outputs")
    return outputs


def split_outputs(reply: CompleteResponse, count: int) -> list[dict[str, Any]]:
    if count == 1:
        is_stream = is_ndjson_stream(reply)
        return [collect_stream_outputs(reply) if is_stream else decode_outputs(reply.body)]
    outputs = decode_outputs(reply.body)
    for name, values in outputs.items():
        if not isinstance(values, list) or len(values) != count:
            raise NoResponse(f"the output {name} does not have {count} values, one per input")
    return [{name: values[number] for name, values in outputs.items()} for number in range(count)]
