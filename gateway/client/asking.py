"""From inputs to records: what is sent, for one or for several, and what is made of the answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gateway.client.errors import ClientError
from gateway.client.inputs import OCTETS, TEXT, Body, Input
from gateway.client.records import Record
from gateway.client.wire import NoAnswer, Wire, failure_of, is_stream
from gateway.triton.http import Reply

JSON: Final = "application/json"
# What one input of a batch may have caused: the others are asked again, each alone.
OF_ONE: Final = (400, 413, 415, 422, 500)


class BadAnswer(ClientError):
    """A success that is no answer of a gateway."""


def stackable(body: Body) -> bool:
    """Whether it is one value, which can stand in a batch with others."""
    if body.content_type == TEXT:
        return is_utf8(body.data)  # else it goes alone, and the gateway says what is wrong with it
    return body.content_type == OCTETS or body.content_type.startswith("image/")


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def together(bodies: Sequence[Body]) -> Body:
    """One request for all: a list in JSON, texts as they are and bytes as base64."""
    values = [value_of(body) for body in bodies]
    return Body(JSON, orjson.dumps({"inputs": values}))


def value_of(body: Body) -> Any:
    if body.content_type == TEXT:
        return body.data.decode()
    return {"b64": base64.b64encode(body.data).decode()}


class Asker:
    """Asks for a group of inputs: a request for all of it, or one for each."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def __call__(self, group: Sequence[Input]) -> list[Record]:
        """A record for each, in their order. Raises `Unreachable`."""
        records: dict[int, Record] = {}
        bodies: dict[int, Body] = {}
        for number, given in enumerate(group):
            try:
                bodies[number] = await given.body()
            except OSError as exc:
                sentence = f"the file cannot be read: {exc.strerror}"
                records[number] = Record(given.name, error=sentence, code="UNREADABLE")
        joint = [number for number, body in bodies.items() if stackable(body)]
        if len(joint) > 1:
            answered = await self._jointly(
                [group[number].name for number in joint], [bodies[number] for number in joint]
            )
            records |= zip(joint, answered, strict=False)
        for number, body in bodies.items():
            if number not in records:
                records[number] = await self._alone(group[number].name, body)
        return [records[number] for number in range(len(group))]

    async def _jointly(self, names: Sequence[str], bodies: Sequence[Body]) -> list[Record]:
        """None at all when each must be asked for alone, to find which one was wrong."""
        body = together(bodies)
        try:
            reply = await self._wire.infer(body.content_type, body.data)
            if reply.status in OF_ONE:
                return []
            if failure := failure_of(reply):
                return [Record(name, None, *failure) for name in names]
            parts = split(outputs_of(reply.body), len(names))
        except (NoAnswer, BadAnswer) as exc:
            return [Record(name, error=str(exc), code="NO_ANSWER") for name in names]
        return [Record(name, part) for name, part in zip(names, parts, strict=True)]

    async def _alone(self, name: str, body: Body) -> Record:
        try:
            reply = await self._wire.infer(body.content_type, body.data)
            if failure := failure_of(reply):
                return Record(name, None, *failure)
            return Record(name, every_output(reply) if is_stream(reply) else outputs_of(reply.body))
        except (NoAnswer, BadAnswer) as exc:
            return Record(name, error=str(exc), code="NO_ANSWER")


def every_output(reply: Reply) -> dict[str, list[Any]]:
    """Of each output what every answer of a stream says, in their order. Raises `BadAnswer`."""
    found: dict[str, list[Any]] = {}
    for line in reply.body.splitlines():
        for name, value in outputs_of(line).items():
            found.setdefault(name, []).append(value)
    return found


def outputs_of(answer: bytes) -> dict[str, Any]:
    """Raises `BadAnswer`."""
    try:
        told = orjson.loads(answer)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("outputs"), dict):
        raise BadAnswer("the answer has no outputs")
    outputs: dict[str, Any] = told["outputs"]
    return outputs


def split(outputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of a batch as those of its inputs. Raises `BadAnswer`."""
    for name, values in outputs.items():
        if not isinstance(values, list) or len(values) != count:
            raise BadAnswer(f"the output {name} has not {count} values, one for each input")
    return [{name: values[at] for name, values in outputs.items()} for at in range(count)]
