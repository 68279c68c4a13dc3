"""Stored events: their ids, by which they are in order in every store, and the choice of some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Final, NamedTuple

import orjson

MAX_EVENTS: Final = 1000
EVENT_ID: Final = re.compile(r"(\d{1,15})-(\d{1,10})", re.ASCII)


class EventId(NamedTuple):
    """The time of storing an event in milliseconds, and its number within that, as in a stream of Redis."""

    time_ms: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.time_ms}-{self.number}"

    @property
    def next(self) -> EventId:
        return EventId(self.time_ms, self.number + 1)


@dataclass(frozen=True)
class StoredEvent:
    id: EventId
    raw: bytes


def parse_event_id(text: str) -> EventId | None:
    match = EVENT_ID.fullmatch(text)
    return None if match is None else EventId(int(match[1]), int(match[2]))


def next_event(events: Sequence[StoredEvent], raw: bytes) -> StoredEvent | None:
    """Return the event to append; None for one that was stored already, without the caller knowing it.

    Its id is higher than the others, also if the clock was set back.
    """
    now = EventId(int(time() * 1000))
    if not events:
        return StoredEvent(now, raw)
    last = events[-1]
    return None if last.raw == raw else StoredEvent(max(now, last.id.next), raw)


def select_events(
    events: Sequence[StoredEvent], start: EventId | None, limit: int
) -> Sequence[StoredEvent]:
    kept = events[-MAX_EVENTS:]
    if start is None:
        return kept[-limit:]
    return [event for event in kept if event.id >= start][:limit]


def decode_event(event: StoredEvent) -> Mapping[str, Any]:
    """Return the document of an event; an empty one if anything else was written into the state."""
    try:
        document = orjson.loads(event.raw)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def find_last_change(events: Sequence[StoredEvent], file: str) -> Mapping[str, Any]:
    documents = map(decode_event, reversed(events))
    return next((each for each in documents if each.get("file") == file), {})


def encode_events(events: Sequence[StoredEvent]) -> bytes:
    return b"[%b]" % b",".join(event.raw for event in events if decode_event(event))


def format_event_line(event: StoredEvent) -> bytes:
    return b"%b %b\n" % (str(event.id).encode(), event.raw)


def parse_event_lines(raw: bytes) -> list[StoredEvent]:
    """Return the events of a file. A line without an end was not finished, because a process was killed."""
    events = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        name, _, document = line.partition(b" ")
        event_id = parse_event_id(name.decode(errors="replace"))
        if event_id is not None:
            events.append(StoredEvent(event_id, document))
    return events
