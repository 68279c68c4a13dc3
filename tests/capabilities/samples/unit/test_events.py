"""The events of samples, and the settings, without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.capabilities.samples.capability import SampleSettings
from gateway.capabilities.samples.delivery import EventQueue
from gateway.capabilities.samples.events import (
    SampleEvent,
    can_have_error,
    encode_event_headers,
    encode_line,
    redact,
)
from gateway.capabilities.samples.recorder import RecordedBody
from gateway.commands.replay import decode_data, rebuild_request
from gateway.messages import CommandError
from gateway.settings import read_settings
from gateway.telemetry.metrics import MetricFactory

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
    body = RecordedBody(queue, [])
    for _ in range(100):
        await body.add({"body": b"ab", "more_body": True})
    assert not queue.reserve(10_000 - 100 * 60)
    await body.add({"body": b"ab"})
    event = body.build_event({})
    assert event.data == b"ab" * 101
    assert queue.reserve(10_000 - len(event.data))


@pytest.mark.parametrize("attribute", ["jsonlength", "contentencoding"])
def test_data_that_is_more_than_json_is_left_out(attribute: str) -> None:
    attributes = {**JSON_TYPE, attribute: "1", "datasha256": "0"}
    event = SampleEvent(attributes, b'{"inputs": {"ssn": 1, "age": 2}}')
    assert redact(event, NAMES).data == b""
    assert "datasha256" not in redact(event, NAMES).attributes


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
