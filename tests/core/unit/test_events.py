"""Events: what is recorded of a change, how it is rendered, and which refusals are logged."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import KEY_FIELDS, describe_caller
from gateway.callers import Caller, Priority
from gateway.commands.resources import format_outcome, format_value
from gateway.config.files import FileChange, WatchedFile, find_differences
from gateway.errors import MalformedRequest
from gateway.repository.events import EventLog
from gateway.repository.models_file import ModelsFile
from gateway.repository.operations import Outcome
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import EventId, encode_events
from gateway.repository.state.places import open_state_store
from gateway.routes.administration import parse_start
from gateway.telemetry import refusals
from gateway.telemetry.audit import MAX_EVENT_BYTES, Event, build_call_event, list_changes
from gateway.telemetry.logs import JsonFormatter
from gateway.telemetry.refusals import RefusalKey, RefusalLog
from gateway.telemetry.request_info import ManagementCall, RequestInfo
from gateway.triton.error_mapping import LoadFailed
from tests.interface.names import read_log_fields
from tests.support.state import opened
from tests.support.wait import wait_until_async


async def read_events(log: EventLog) -> list[dict[str, Any]]:
    return list(json.loads(encode_events(await log.read(None, 10))))


LOADED, UNLOADED = {"loaded": True}, {"loaded": False}


def test_audit_line_and_listed_event_render_one_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    call = ManagementCall("m", "10.0.0.1", "load")
    call.record_change("model m", UNLOADED, LOADED)
    failure = Outcome("UNAVAILABLE", LoadFailed("m", "x" * 999))
    call.outcomes = {"b:8000": failure, "a:8000": Outcome("READY")}
    info = RequestInfo("r-1", "/v2/repository/models/{model}/load", key="ops", caller_name="ops")
    event = build_call_event(
        info, call, "POST /x: failed", "failed", status=502, code="PARTLY_DONE"
    )
    event.write_line(method="POST", path="/x", duration_ms=1.5)
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    document = event.to_dict()
    assert line.keys() - {"code"} == read_log_fields("gateway.audit")
    for name, value in document.items():
        assert name == "time" or line[name] == value, name
    assert list(document)[:3] == ["time", "message", "action"]
    assert document["caller"] == "ops"
    assert document["changes"] == [{"subject": "model m", "from": UNLOADED, "to": LOADED}]
    assert document["replicas"]["a:8000"] == {"state": "READY"}
    assert len(document["replicas"]["b:8000"]["reason"]) == 300
    assert "" not in document.values()


def test_change_that_was_reverted_is_none_and_several_of_one_subject_are_one() -> None:
    call = ManagementCall("m")
    call.record_change("model m", None, LOADED)
    call.record_change("model m", LOADED, UNLOADED)
    call.record_change("model n", LOADED, UNLOADED)
    call.record_change("model n", UNLOADED, LOADED)
    assert call.changes == {"model m": (None, UNLOADED)}


def test_entry_that_changed_is_described_by_the_fields_that_differ() -> None:
    before = {"a": {"roles": ["infer"], "models": ["*"]}, "b": {"roles": ["admin"]}}
    after = {"a": {"roles": ["admin"], "models": ["*"]}, "c": {"roles": ["infer"]}}
    assert find_differences(before, after) == [
        ("a", {"roles": ["infer"]}, {"roles": ["admin"]}),
        ("b", {"roles": ["admin"]}, None),
        ("c", None, {"roles": ["infer"]}),
    ]


def test_every_field_of_a_key_but_its_name_is_described() -> None:
    assert describe_caller(Caller("a")).keys() == KEY_FIELDS - {"name"}
    before, after = (
        {"a": describe_caller(Caller("a", priority=each))}
        for each in (Priority.background, Priority.normal)
    )
    assert find_differences(before, after) == [
        ("a", {"priority": "background"}, {"priority": "normal"})
    ]


def test_event_has_a_limited_size_and_the_failures_first() -> None:
    call = ManagementCall("m", "10.0.0.1", "load")
    for number in range(9999):
        call.record_change(f"key {number}", None, {"roles": ["infer"]})
    failure = Outcome("UNAVAILABLE", LoadFailed("m", "語" * 300))
    call.outcomes = {f"10.0.1.{number}:8000": Outcome("READY") for number in range(300)}
    call.outcomes["10.0.1.250:8000"] = call.outcomes["10.0.1.251:8000"] = failure
    event = build_call_event(RequestInfo("r-1"), call, "x" * 9999, "failed", reason="語" * 9999)
    document = json.loads(event.encode())
    assert len(event.encode()) <= MAX_EVENT_BYTES
    *changes, others = document["changes"]
    assert changes[0]["subject"] == "key 0"
    assert others == {"subject": f"{9999 - len(changes)} others", "from": None, "to": None}
    addresses = list(document["replicas"])
    assert addresses[:3] == ["10.0.1.250:8000", "10.0.1.251:8000", "10.0.1.0:8000"]
    assert addresses[-1] == f"{300 - len(addresses) + 1} others"
    assert format_outcome(document).startswith("failed: 語")  # without a number of replicas
    long_entry = {"models": [f"model {number}" for number in range(5000)]}
    (others,) = list_changes([("key a", None, long_entry)])
    assert others["subject"] == "1 other"


VALUES: list[tuple[Any, str]] = [
    (None, "none"),
    ("warning", "warning"),
    ({"loaded": True}, "loaded"),
    ({"loaded": False}, "not loaded"),
    ([], "none"),
    ([1, 2], "1 2"),
    ({"roles": ["infer", "admin"]}, "roles infer admin"),
    ({"versions": {"1": 90, "2": 10}}, "versions 1 90, 2 10"),
]


def test_value_of_a_change_is_shown_in_words() -> None:
    assert [format_value(value) for value, _ in VALUES] == [words for _, words in VALUES]


STARTS = {
    "": None,
    "1769868180000-3": EventId(1769868180000, 3),
    "2026-01-31T14:03:00Z": EventId(1769868180000),
    "2026-01-31t14:03:00.5z": EventId(1769868180500),
    "2026-01-31T15:03:00.123456+01:00": EventId(1769868180123),
    "2026-01-31T15:03:00 01:00": EventId(1769868180000),  # a plus sign that was not encoded
    "0001-01-01T00:00:00Z": EventId(0),
}
INVALID_STARTS = (
    "yesterday",
    "2026-01-31",
    "2026-01-31T14:03:00",
    "2026-13-31T14:03:00Z",
    "1-",
    "-1",
    "9" * 20,
)


def test_start_is_a_time_or_an_id(subtests: pytest.Subtests) -> None:
    for text, start in STARTS.items():
        with subtests.test(text):
            is_id = start is not None and text == str(start)
            assert parse_start(*("", text) if is_id else (text, "")) == start
    for text in INVALID_STARTS:
        with subtests.test(text), pytest.raises(MalformedRequest, match="is not a time, such as"):
            parse_start(text, "")
        with subtests.test(after=text), pytest.raises(MalformedRequest, match='is not the "next"'):
            parse_start("", text)


async def test_change_of_a_file_is_stored_by_the_first_gateway_that_reads_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.yaml"
    path.touch()
    url = f"file://{tmp_path}/state.db"

    async def change(digest: str, *logs: int) -> None:
        change: FileChange[Any] = FileChange(
            {}, file_sha256=digest, differences=[("ops", None, {"roles": ["admin"]})]
        )
        for index in logs:
            file: WatchedFile[Any] = WatchedFile(path, Path.read_text)
            states[index].events.watch(file, "keys file", "key")
            assert file.on_change is not None
            file.on_change(change)
        await asyncio.gather(*(states[index].events.flush() for index in logs))

    async with opened(url, 2) as stores:
        states = [SharedState(store, ModelsFile(None), can_upload=False) for store in stores]
        await change("1", 0, 1)
        await change("2", 1)
        await change("2", 0)
        await change("1", 0, 1)
        events = await read_events(states[0].events)
    assert [event["sha256"] for event in events] == ["1", "2", "1"]
    assert events[0]["changes"] == [
        {"subject": "key ops", "from": None, "to": {"roles": ["admin"]}}
    ]


async def test_events_wait_for_a_state_that_is_unavailable(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store = open_state_store(f"file://{folder}/state.db")
    events = SharedState(store, ModelsFile(None), can_upload=False).events
    folder.rename(tmp_path / "away")
    for name in ("first", "second"):
        events.record(Event(name, "load", "succeeded"))
        await events.flush()
    (tmp_path / "away").rename(folder)
    await events.flush()
    listed = await read_events(events)
    assert [event["message"] for event in listed] == ["first", "second"]
    await store.close()


async def test_event_that_cannot_be_encoded_is_logged_and_does_not_stop_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = SharedState(open_state_store("memory:"), ModelsFile(None), can_upload=False).events
    path = os.fsdecode(b"/etc/keys-\xff.yaml")
    events.record(Event(f"{path} changed", "keys file", "succeeded", file=path))
    events.record(Event("too large", "load", "succeeded", parameters=("x" * MAX_EVENT_BYTES,)))
    events.record(Event("next", "load", "succeeded"))
    assert [event["message"] for event in await read_events(events)] == ["next"]
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    first = "an event (keys file) is not stored, because of its text: str is not valid UTF-8"
    assert messages[0].startswith(first)
    assert messages[1].endswith(f"it is larger than {MAX_EVENT_BYTES} bytes")
    line = JsonFormatter().format_line(0.0, "info", "changed", {"file": path})
    assert json.loads(line)["file"] == path


async def test_refused_calls_are_no_events_of_the_state() -> None:
    events = SharedState(open_state_store("memory:"), ModelsFile(None), can_upload=False).events
    for status in (401, 403, 404, 409, 422):
        events.record(Event("refused", "load", "failed", status=status))
    report = {"a:8000": {"state": "UNAVAILABLE", "reason": "no memory"}}
    kept = [
        Event("every replica refused it", "load", "failed", status=422, replicas=report),
        Event("partly done", "load", "failed", status=502),
        Event("it goes on", "load", "client disconnected", status=499),
    ]
    for event in kept:
        events.record(event)
    listed = await read_events(events)
    assert listed == [event.to_dict() for event in kept]


async def test_refusals_are_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(interval_s=0.2)
    unknown = RefusalKey("10.0.0.9", "UNAUTHENTICATED", "")
    is_first = [log.record(unknown, "unknown key", status=401) for _ in range(50)]
    assert is_first == [True] + 49 * [False]
    ops = RefusalKey("ops", "FORBIDDEN", "")
    log.record(ops, "key 'ops' lacks the role 'admin'", status=403)
    first = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert first == [
        ("WARNING", "refused a request of 10.0.0.9: unknown key"),
        ("WARNING", "refused a request of ops: key 'ops' lacks the role 'admin'"),
    ]
    caplog.clear()
    await wait_until_async(lambda: bool(caplog.records))
    (counted,) = caplog.records
    assert counted.getMessage() == "refused 49 more requests of 10.0.0.9 within 0.2 s"
    assert (vars(counted)["caller"], vars(counted)["code"]) == ("10.0.0.9", "UNAUTHENTICATED")
    log.record(unknown, "unknown key", status=401)  # in the next interval
    caplog.clear()
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "refused 1 more request of 10.0.0.9 within 0.2 s"
    ]


@pytest.mark.fault("thousands of callers with wrong keys")
async def test_refused_callers_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog()
    for number in range(2 * refusals.MAX_CALLERS):
        key = RefusalKey(f"10.{number >> 8}.{number & 255}.1", "UNAUTHENTICATED", "")
        log.record(key, "unknown key")
    assert len(caplog.records) == refusals.MAX_CALLERS + 1
    log.close()
    assert vars(caplog.records[-1])["count"] == refusals.MAX_CALLERS - 1
    assert vars(caplog.records[-1])["caller"] == refusals.OTHERS
