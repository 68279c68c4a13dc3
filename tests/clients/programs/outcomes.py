"""What every client program does: make its calls, and print one line of JSON for each outcome.

An outcome is a text that is the same for two servers with the same models: without times, ids and addresses.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Call = tuple[str, Callable[[], Any]]


class Responses(list[Any]):
    """The responses of a stream: each has its own outcome."""


class ResponseError(Exception):
    """An error among the responses of a stream, which has no status."""


class Target(NamedTuple):
    """A server: its addresses without a scheme, and the key that each call presents."""

    http: str
    grpc: str
    key: str
    number: int = 0

    @property
    def own_model(self) -> str:
        """A model that is loaded and unloaded only here: the gateways do not share their state."""
        return f"unloaded_{self.number}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


def print_outcomes(list_calls: Callable[[Target], Iterable[Call]]) -> None:
    """Make the calls at every target that the command line names: three words each.

    If the environment has CALLS, a regular expression, only those that begin with it.
    """
    words = sys.argv[1:]
    pattern = re.compile(os.environ.get("CALLS", ""))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for number in range(len(words) // 3):
        http, grpc, key = words[3 * number : 3 * number + 3]
        target = Target(http, grpc, key, number)
        for name, call in list_calls(target):
            if not pattern.match(name):
                continue
            outcomes = [mask(outcome, target) for outcome in find_outcomes(loop, call)]
            line = {"target": number, "call": name, "outcomes": outcomes}
            print(json.dumps(line, ensure_ascii=False), flush=True)


def find_outcomes(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> list[str]:
    try:
        value = call()
        if inspect.isawaitable(value):
            value = loop.run_until_complete(within_a_minute(value))
        responses = value if isinstance(value, Responses) else [value]
        return [describe_value(each) for each in responses]
    # Whatever a client raises is its outcome; grpcio's client for asyncio raises that it was cancelled.
    except (Exception, asyncio.CancelledError) as exc:  # noqa: BLE001
        return [describe_error(exc)]


def describe_value(value: Any) -> str:
    if isinstance(value, BaseException):
        return describe_error(value)
    return json.dumps(to_json(value), ensure_ascii=False, sort_keys=True)


async def within_a_minute(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 60)


def describe_error(exc: BaseException) -> str:
    """The status and the message of an error, of whatever client."""
    status, message = getattr(exc, "status", None), getattr(exc, "message", None)
    if hasattr(exc, "code") and hasattr(exc, "details"):  # of grpcio
        return f"{exc.code().name}: {exc.details()}"
    if callable(status) and callable(message):  # of tritonclient
        return f"{status()}: {message()}".replace("StatusCode.", "")
    if hasattr(exc, "status_code"):  # of openai
        return f"{exc.status_code}: {exc}"
    if hasattr(exc, "response"):  # of httpx, with a message of KServe's
        text = str(exc).partition(f", '{exc.response.status_code} ")[0]
        return f"{exc.response.status_code}: {text}"
    if isinstance(exc, ResponseError):
        return f"None: {exc}"
    return f"{type(exc).__name__}: {exc}"


def to_json(value: Any) -> Any:
    """Results of all clients, arrays and messages as values of JSON."""
    if hasattr(value, "as_numpy"):
        return describe_result(value)
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if hasattr(value, "DESCRIPTOR"):
        from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 - a client may lack it

        return MessageToDict(value, preserving_proto_field_name=True)
    if hasattr(value, "to_dict"):
        return to_json(value.to_dict())
    if isinstance(value, dict):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value


def describe_result(result: Any) -> dict[str, Any]:
    """A result of tritonclient: its response, and the values that the client read from it."""
    response = to_json(result.get_response())
    response.pop("raw_output_contents", None)
    response["outputs"] = [
        {
            "name": each["name"],
            "datatype": each["datatype"],
            "shape": [int(size) for size in each["shape"]],
            "values": to_json(result.as_numpy(each["name"])),
        }
        for each in response.get("outputs", ())
    ]
    return dict(response)


def mask(outcome: str, target: Target) -> str:
    """Remove what differs from one server or request to the next."""
    outcome = re.sub(r"unloaded_\d", "unloaded", outcome)
    outcome = re.sub(r"\[request id: [^\]]*\] ", "", outcome)
    outcome = outcome.replace(target.http, "ADDRESS").replace(target.grpc, "ADDRESS")
    return re.sub(r"0x[0-9a-f]+", "0x…", outcome)
