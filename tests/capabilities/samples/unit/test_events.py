"""The events of samples, and the settings, without a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from tritonclient.grpc import service_pb2

from gateway.capabilities.samples.capability import SampleSettings
from gateway.capabilities.samples.delivery import EventQueue, EventSender
from gateway.capabilities.samples.events import (
    REQUEST_TYPE,
    SampleEvent,
    can_have_error,
    encode_event_headers,
    encode_line,
    redact,
)
from gateway.capabilities.samples.grpc_messages import (
    REQUEST_MESSAGE,
    build_message_headers,
    convert_message,
    is_message,
)
from gateway.capabilities.samples.recorder import SampledBody
from gateway.capabilities.samples.sinks import FolderSink
from gateway.client.bodies import Body
from gateway.commands.inference.replay import decode_data, rebuild_request
from gateway.config.settings import read_settings
from gateway.messages import CommandError
from gateway.services import Services
from gateway.telemetry.metrics import MetricFactory
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

NAMES = frozenset(("ssn", "age"))
JSON_TYPE = {"datacontenttype": "application/json"}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"inputs": {"ssn": 1, "age": 2, "x": 3}}, {"inputs": {"ssn": None, "age": None, "x": 3}}),
        ({"instances": [{"ssn": 1, "age": [2]}]}, {"instances": [{"ssn": None, "age": None}]}),
        (
            {"inputs": [{"name": "ssn", "data": [1]}, {"name": "age", "data": [2]}]},
            {"inputs": [{"name": "ssn", "data": None}, {"name": "age", "data": None}]},
        ),
        ({"inputs": {"ssn": 1}}, None),
        ({"inputs": [{"name": ["ssn"], "age": 1}]}, None),
        ({"ssn": 1, "age": 2, "parameters": {"ssn": 1, "age": 2}, "x": 3}, None),
        ([1, 2], None),
    ],
)
def test_values_are_removed_by_the_names_of_their_tensors(document: Any, expected: Any) -> None:
    event = redact(SampleEvent(JSON_TYPE, json.dumps(document).encode()), NAMES)
    assert event.attributes["redacted"] == "true"
    assert (json.loads(event.data) if event.data else None) == expected


def test_values_of_a_tensor_that_is_called_name_are_removed() -> None:
    data = b'{"inputs":[{"name":"name","data":["Alice"]}]}'
    event = redact(SampleEvent(JSON_TYPE, data), frozenset(("name",)))
    assert json.loads(event.data) == {"inputs": [{"name": None, "data": None}]}


@pytest.mark.parametrize(
    ("attributes", "is_kept"),
    [
        ({"path": "/v2/models/m/generate"}, True),
        ({"path": "/v1/models/m/infer", "datacontenttype": "text/plain"}, False),
        ({"path": "/v1/models/m/infer"}, False),
    ],
)
def test_json_that_can_be_the_value_of_a_tensor_is_left_out(
    attributes: dict[str, str], is_kept: bool
) -> None:
    event = redact(SampleEvent(attributes, b'{"inputs":{"ssn":1,"age":2},"x":3}'), NAMES)
    assert bool(event.data) is is_kept


@pytest.mark.parametrize(
    ("status", "content_type", "expected"),
    [
        (200, "application/json", False),
        (422, "application/json", True),
        (200, "text/event-stream; charset=utf-8", True),
        (200, "application/x-ndjson", True),
    ],
)
def test_answers_that_can_have_an_error_are_known(
    status: int, content_type: str, expected: bool
) -> None:
    event = SampleEvent({"statuscode": status, "datacontenttype": content_type}, b"")
    assert can_have_error(event) is expected


async def test_pieces_of_a_body_count_with_their_own_memory() -> None:
    queue = EventQueue(MetricFactory(CollectorRegistry()), max_bytes=10_000)
    body = SampledBody(queue, [])
    for _ in range(100):
        await body.add(b"ab", is_last=False)
    assert not queue.reserve(10_000 - 100 * 60)
    await body.add(b"ab")
    event = body.build_event({})
    assert event.data == b"ab" * 101
    assert queue.reserve(10_000 - len(event.data))


async def test_events_are_taken_until_their_data_is_enough() -> None:
    queue = EventQueue(MetricFactory(CollectorRegistry()))
    queue.put([SampleEvent({}, bytes(size)) for size in (5, 0, 6, 7, 0)])
    for expected in ([5, 0, 6], [7, 0]):
        async with queue.take(enough_bytes=8) as events:
            assert [len(event.data) for event in events] == expected
    queue.put([SampleEvent({}, b"")] * 2)
    async with queue.take(enough_bytes=0) as events:
        assert len(events) == 1


async def test_event_loop_runs_between_the_messages_that_are_converted(tmp_path: Path) -> None:
    turns = 0
    turns_of_events: list[tuple[int, int]] = []

    class CountingSink(FolderSink):
        async def send(self, events: Sequence[SampleEvent]) -> None:
            turns_of_events.append((turns, len(events)))

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    queue = EventQueue(MetricFactory(CollectorRegistry()))
    content_type = dict(build_message_headers(REQUEST_MESSAGE))[b"content-type"].decode()
    attributes = {
        "path": f"{GRPC_SERVICE}/ModelInfer",
        "datacontenttype": content_type,
        "model": "",
    }
    queue.put([SampleEvent({**attributes, "type": REQUEST_TYPE}, b"")] * 100)
    sink = CountingSink(tmp_path, max_age_hours=1, max_bytes=1 << 20)
    sender = EventSender(queue, sink, cast(Services, None), frozenset())
    counting = asyncio.create_task(count_turns())
    async with sender.run():
        await queue.wait_until_empty()
    counting.cancel()
    ((turned, count),) = turns_of_events
    assert turned >= count == 100


@pytest.mark.parametrize("attribute", ["jsonlength", "contentencoding"])
def test_data_that_is_more_than_json_is_left_out(attribute: str) -> None:
    attributes = {**JSON_TYPE, attribute: "1", "datasha256": "0"}
    event = SampleEvent(attributes, b'{"inputs": {"ssn": 1, "age": 2}}')
    assert redact(event, NAMES).data == b""
    assert "datasha256" not in redact(event, NAMES).attributes


def build_grpc_event(data: bytes, **attributes: str) -> SampleEvent:
    content_type = build_message_headers(REQUEST_MESSAGE)[0][1].decode()
    return SampleEvent({"datacontenttype": content_type, **attributes}, data)


@pytest.mark.parametrize(
    ("datatype", "field", "values", "expected"),
    [
        ("BF16", "fp32_contents", [1.0, 2.0], b"\x80\x3f\x00\x40"),
        ("UINT8", "uint_contents", [1, 255], b"\x01\xff"),
        ("INT64", "int64_contents", [-1] * 5000, b"\xff" * 40_000),
        ("BYTES", "bytes_contents", [b"a", b""], b"\x01\x00\x00\x00a\x00\x00\x00\x00"),
    ],
)
def test_contents_of_a_tensor_over_grpc_become_binary_data(
    datatype: str, field: str, values: list[Any], expected: bytes
) -> None:
    request: Any = service_pb2.ModelInferRequest()
    tensor = request.inputs.add(name="X", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    event = convert_message(build_grpc_event(request.SerializeToString()), frozenset())
    length = int(event.attributes["jsonlength"])
    assert json.loads(event.data[:length])["inputs"][0]["shape"] == [len(values)]
    assert event.data[length:] == expected


def test_message_that_cannot_be_read_is_left_out() -> None:
    too_large: Any = service_pb2.ModelInferRequest()
    tensor = too_large.inputs.add(name="X", datatype="UINT8", shape=[1])
    tensor.contents.int_contents.append(-1)
    for data in (b"\xff", too_large.SerializeToString()):
        assert convert_message(build_grpc_event(data), frozenset()).data == b""


def test_type_that_a_client_sends_over_http_makes_no_message() -> None:
    assert is_message(build_grpc_event(b"", path="/inference.GRPCInferenceService/ModelInfer"))
    assert not is_message(build_grpc_event(b"", path="/v2/models/m/infer"))


def test_long_message_has_no_hash_if_it_has_values_to_hide() -> None:
    event = build_grpc_event(b"", datalength="2000000", datasha256="0")
    assert convert_message(event, frozenset()) == event
    assert "datasha256" not in convert_message(event, frozenset(["X"])).attributes


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("FP16", np.array([1, 0.5], np.float16).tobytes(), [[1.0, 0.5]]),
        ("BF16", b"\x80\x3f\x00\x40", [[1.0, 2.0]]),
        ("BYTES", b"\x01\x00\x00\x00a\x00\x00\x00\x00", [[{"b64": "YQ=="}, {"b64": ""}]]),
    ],
)
def test_request_of_a_stream_is_sent_again_as_json(
    datatype: str, data: bytes, expected: list[Any]
) -> None:
    request: Any = service_pb2.ModelInferRequest(raw_input_contents=[data])
    request.inputs.add(name="X", datatype=datatype, shape=[1, 2])
    request.parameters["top_k"].int64_param = 5
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    sampled = build_grpc_event(request.SerializeToString(), path=path, model="m", modelversion="2")
    line = json.loads(encode_line(convert_message(sampled, frozenset())))
    rebuilt = rebuild_request(line, "")
    assert (rebuilt.path, rebuilt.headers["accept"]) == (
        "/v1/models/m/versions/2/infer",
        "application/x-ndjson",
    )
    assert isinstance(rebuilt.body, Body)
    assert json.loads(rebuilt.body.content) == {
        "inputs": {"X": expected},
        "parameters": {"top_k": 5},
    }
    assert rebuild_request(line, "3").path == "/v1/models/m/versions/3/infer"


def test_headers_have_attributes_in_ascii() -> None:
    event = SampleEvent({"caller": 'a "ü" 5%', "statuscode": 200, "datacontenttype": "a/b"}, b"")
    assert encode_event_headers(event) == [
        (b"ce-caller", b"a%20%22%C3%BC%22%205%25"),
        (b"ce-statuscode", b"200"),
        (b"content-type", b"a/b"),
    ]


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", b'{"a":[1,0.5,null],"b":"\xc3\xbc"}'),
        ("application/json", b'{"a":18446744073709551615}'),
        ("application/json", b'"text"'),
        ("application/json", b"\xff"),
        ("application/json", b""),
        ("text/plain", b"two\nlines"),
        ("text/plain", b"\xff"),
        ("image/png", b"\x89PNG\r\n\xff"),
        ("", b'"text"'),
    ],
)
def test_data_in_a_line_is_restored(content_type: str, data: bytes) -> None:
    line = encode_line(SampleEvent({"datacontenttype": content_type}, data))
    assert line.count(b"\n") == 1
    assert decode_data(json.loads(line)) == data


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models/m/infer", "/v1/models/m/versions/3/infer"),
        ("/v1/models/m:predict", "/v1/models/m/versions/3:predict"),
        ("/v1/models/m/labels/stable:predict", "/v1/models/m/versions/3:predict"),
        ("/v2/models/m/versions/1/infer", "/v2/models/m/versions/3/infer"),
        ("/v1/models/versions/infer", "/v1/models/versions/versions/3/infer"),
    ],
)
def test_version_replaces_that_of_the_path(path: str, expected: str) -> None:
    assert rebuild_request({"path": path}, "3").path == expected


@pytest.mark.parametrize(
    "samples", ["collector", "ftp://host", "https://", "https://user:secret@host/", "file://folder"]
)
def test_address_that_is_no_sink_is_refused(samples: str) -> None:
    with pytest.raises(
        CommandError, match=r"^GATEWAY_SAMPLES cannot be .*: .*use https://"
    ) as error:
        read_settings(SampleSettings, samples=samples)
    assert "secret" not in str(error.value)
