"""From inputs to records: what is sent, for one or for several, and what is made of the answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.client.errors import ClientError
from gateway.client.infer_client import InferClient, NoResponse, extract_failure, is_ndjson_stream
from gateway.client.inputs import OCTET_STREAM_TYPE, PLAIN_TEXT_TYPE, Input, InputBody
from gateway.client.records import Record
from gateway.triton.http.client import CompleteResponse

JSON_BODY_TYPE: Final = "application/json"
# What one input of a batch may have caused: the others are asked again, each alone.
BATCH_SPLIT_STATUSES: Final = (400, 413, 415, 422, 500)


class InvalidGatewayResponse(ClientError):
    """A success that is no answer of a gateway."""


def is_batchable(body: InputBody) -> bool:
    """Whether it is one value, which can stand in a batch with others."""
    if body.content_type == PLAIN_TEXT_TYPE:
        return is_utf8(body.data)  # else it goes alone, and the gateway says what is wrong with it
    return body.content_type == OCTET_STREAM_TYPE or body.content_type.startswith("image/")


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def combine_bodies(bodies: Sequence[InputBody]) -> InputBody:
    """One request for all: a list in JSON, texts as they are and bytes as base64."""
    values = [encode_batch_value(body) for body in bodies]
    return InputBody(JSON_BODY_TYPE, orjson.dumps({"inputs": values}))


def encode_batch_value(body: InputBody) -> Any:
    if body.content_type == PLAIN_TEXT_TYPE:
        return body.data.decode()
    return {"b64": base64.b64encode(body.data).decode()}


class BatchRequester:
    """Asks for a group of inputs: a request for all of it, or one for each."""

    def __init__(self, client: InferClient) -> None:
        self._client = client

    async def __call__(self, group: Sequence[Input]) -> list[Record]:
        """A record for each, in their order. Raises `Unreachable`."""
        records: dict[int, Record] = {}
        bodies: dict[int, InputBody] = {}
        for number, given in enumerate(group):
            try:
                bodies[number] = await given.read_async()
            except OSError as exc:
                sentence = f"the file cannot be read: {exc.strerror}"
                records[number] = Record(given.name, error=sentence, code="UNREADABLE")
        joint = [number for number, body in bodies.items() if is_batchable(body)]
        if len(joint) > 1:
            answered = await self._infer_batch(
                [group[number].name for number in joint], [bodies[number] for number in joint]
            )
            records |= zip(joint, answered, strict=False)
        for number, body in bodies.items():
            if number not in records:
                records[number] = await self._infer_single(group[number].name, body)
        return [records[number] for number in range(len(group))]

    async def _infer_batch(self, names: Sequence[str], bodies: Sequence[InputBody]) -> list[Record]:
        """None at all when each must be asked for alone, to find which one was wrong."""
        body = combine_bodies(bodies)
        try:
            reply = await self._client.infer(body.content_type, body.data)
            if reply.status in BATCH_SPLIT_STATUSES:
                return []
            if failure := extract_failure(reply):
                return [Record(name, None, *failure) for name in names]
            parts = split_batch_outputs(decode_outputs(reply.body), len(names))
        except (NoResponse, InvalidGatewayResponse) as exc:
            return [Record(name, error=str(exc), code="NO_ANSWER") for name in names]
        return [Record(name, part) for name, part in zip(names, parts, strict=True)]

    async def _infer_single(self, name: str, body: InputBody) -> Record:
        try:
            reply = await self._client.infer(body.content_type, body.data)
            if failure := extract_failure(reply):
                return Record(name, None, *failure)
            return Record(
                name,
                collect_stream_outputs(reply)
                if is_ndjson_stream(reply)
                else decode_outputs(reply.body),
            )
        except (NoResponse, InvalidGatewayResponse) as exc:
            return Record(name, error=str(exc), code="NO_ANSWER")


def collect_stream_outputs(reply: CompleteResponse) -> dict[str, list[Any]]:
    """Of each output what every answer of a stream says, in their order. Raises `BadAnswer`."""
    found: dict[str, list[Any]] = {}
    for line in reply.body.splitlines():
        for name, value in decode_outputs(line).items():
            found.setdefault(name, []).append(value)
    return found


def decode_outputs(body: bytes) -> dict[str, Any]:
    """Raises `BadAnswer`."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("outputs"), dict):
        raise InvalidGatewayResponse("the answer has no outputs")
    outputs: dict[str, Any] = told["outputs"]
    return outputs


def split_batch_outputs(outputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of a batch as those of its inputs. Raises `BadAnswer`."""
    for name, values in outputs.items():
        if not isinstance(values, list) or len(values) != count:
            raise InvalidGatewayResponse(
                f"the output {name} has not {count} values, one for each input"
            )
    return [{name: values[at] for name, values in outputs.items()} for at in range(count)]
