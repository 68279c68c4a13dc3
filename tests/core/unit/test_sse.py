"""Events pass but for errors and line separators, however the bytes are split."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.capacity.admission import AdmissionQueue, Slot
from gateway.fleet.inference import ResultStream
from gateway.media_types import EVENT_STREAM, escape_line_separators
from gateway.routes.infer import STREAM_FORMATS, InferStreamResponse
from gateway.routes.passthrough.sse import MAX_HELD_EVENT_BYTES, EventStreamScrubber
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo

GOOD = b'data: {"model_name":"m","text":"data: {\\"error\\": no}"}\n\n'
BAD = b'data: {"error":"boom /srv/x"}\n\n'
OTHER = b": a comment\n\nevent: x\ndata: 1\n\n"


def passed(stream: bytes, cuts: list[int]) -> bytes:
    scrubber = EventStreamScrubber(lambda payload: b"<" + payload[:9] + b">")
    ends = sorted({cut % (len(stream) + 1) for cut in cuts} | {len(stream)})
    pieces = [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return b"".join(map(scrubber.feed, pieces)) + scrubber.end()


@given(st.lists(st.sampled_from([GOOD, BAD, OTHER]), max_size=6), st.lists(st.integers(0, 999)))
def test_only_errors_are_rewritten_wherever_the_stream_is_cut(
    events: list[bytes], cuts: list[int]
) -> None:
    expected = [b'data: <{"error":>\n\n' if event is BAD else event for event in events]
    assert passed(b"".join(events), cuts) == b"".join(expected)


@given(st.binary(max_size=60), st.lists(st.integers(0, 999)))
def test_other_data_passes_unchanged(junk: bytes, cuts: list[int]) -> None:
    stream = b"data: {}\n\n" + junk.replace(b"error", b"")
    assert passed(stream, cuts) == escape_line_separators(stream)


SEPARATED = 'data: {"text":"a\x85b\u2028\u2029c"}\n\n'.encode()
ESCAPED = b'data: {"text":"a\\u0085b\\u2028\\u2029c"}\n\n'


@given(st.lists(st.integers(0, 999)))
def test_line_separator_is_escaped_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    assert passed(SEPARATED + BAD + SEPARATED, cuts) == ESCAPED + b'data: <{"error":>\n\n' + ESCAPED
    # Other characters begin in the same way.
    others = 'data: "\u2027\u20ac\xa0é\U0001f600"\n\n'.encode()
    assert passed(others, cuts) == others


def test_event_passes_as_soon_as_it_cannot_be_an_error() -> None:
    scrubber = EventStreamScrubber(bytes)
    assert scrubber.feed(b'data: {"te') == b'data: {"te'
    assert scrubber.feed(b'xt": 1}\n\ndata: {"err') == b'xt": 1}\n\n'
    assert scrubber.feed(b'or": 2}\n') == b""
    assert scrubber.feed(b"\n") == b'data: {"error": 2}\n\n'
    assert scrubber.feed(b'data: {"error": 3') == b""
    assert scrubber.end() == b'data: {"error": 3\n\n'


@pytest.mark.fault("a response does not end, or is larger than the limit")
@given(st.lists(st.integers(0, 9 * MAX_HELD_EVENT_BYTES), max_size=9))
def test_endless_error_event_is_truncated(cuts: list[int]) -> None:
    scrubber = EventStreamScrubber(lambda payload: b"<%d>" % len(payload))
    stream = b'data: {"error":"' + b"x\n" * (4 * MAX_HELD_EVENT_BYTES) + b"\n" + GOOD + BAD
    ends = sorted({cut % len(stream) for cut in cuts} | {len(stream)})
    pieces = [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    output = b"".join(map(scrubber.feed, pieces)) + scrubber.end()
    kept = stream[:MAX_HELD_EVENT_BYTES].removeprefix(b"data: ").rstrip(b"\n")
    complete = BAD.removeprefix(b"data: ").rstrip(b"\n")
    expected = b"data: <%d>\n\n" % len(kept) + GOOD + b"data: <%d>\n\n" % len(complete)
    assert output == expected
    # The event is sent when it has reached the limit, and not at its end.
    scrubber = EventStreamScrubber(lambda _: b"an error")
    scrubber.feed(b'data: {"error":"')
    output = b"".join(scrubber.feed(b"x" * 1000) for _ in range(1000))
    assert output == b"data: an error\n\n"
    assert scrubber.end() == b""


class NoResults(ResultStream):
    """The results of a model that sends none."""

    def __init__(self) -> None:
        self.is_closed = False

    async def read_json(self) -> bytes | None:
        return None

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("client_leaves", [False, True])
async def test_slot_of_a_stream_is_released_when_the_stream_ends(client_leaves: bool) -> None:
    admission = AdmissionQueue(1, 1, 1, Metrics())
    slot = Slot(admission, "model", RequestInfo("id"))
    await slot.acquire(1)

    async def send(message: MutableMapping[str, Any]) -> None:
        if client_leaves:
            raise OSError("the client has left")

    async def receive() -> MutableMapping[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    results = NoResults()
    response = InferStreamResponse(results, STREAM_FORMATS[EVENT_STREAM], "id", slot)
    with pytest.raises(OSError, match="has left") if client_leaves else nullcontext():
        await response({"type": "http"}, receive, send)
    assert admission.running == 0
    assert results.is_closed
