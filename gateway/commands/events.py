"""The command `events`: what changed, by whom, and with which outcome."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

import orjson
import typer

from gateway.commands import tables
from gateway.messages import escape_unprintable, escape_unprintable_json

if TYPE_CHECKING:
    from gateway.client import Client

POLL_S: Final = 2.0
AGE: Final = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
WORDS: Final = {None: "none", True: "yes", False: "no"}
COLUMNS: Final = ("TIME", "WHO", "WHAT", "CHANGES", "OUTCOME")


def print_events(client: Client, since: str, limit: int, *, follow: bool, json: bool) -> None:
    """Print the events; if `follow` is set, one in each line, and later ones as they come."""
    page = client.events(parse_since(since), limit=limit)
    if not follow:
        tables.print_entries(page["events"], COLUMNS, format_event_row, json=json)
    while follow:
        for event in page["events"]:
            text = orjson.dumps(event).decode() if json else "  ".join(format_event_row(event))
            typer.echo(escape_unprintable_json(text) if json else escape_unprintable(text))
        if not page["events"]:
            time.sleep(POLL_S)
        page = client.events(after=page["next"], limit=limit)


def parse_since(since: str) -> str | datetime:
    """Return the time of an age such as 5m; the gateway reads everything else."""
    match = AGE.fullmatch(since)
    if match is None:
        return since
    return datetime.now(timezone.utc) - timedelta(**{UNITS[match[2]]: int(match[1])})


def format_event_row(event: Mapping[str, Any]) -> tuple[str, ...]:
    changes = (
        f"{each['subject']}: {format_value(each['from'])} → {format_value(each['to'])}"
        for each in event.get("changes", [])
    )
    who = event.get("caller") or event.get("file", "")
    what = "; ".join(changes) or event.get("model", "")
    return event["time"], who, event["action"], what, format_outcome(event)


def format_value(value: Any) -> str:
    """Return a value in one line, such as `versions 1 90, 2 10` for `{"versions": {"1": 90, "2": 10}}`."""
    if isinstance(value, Mapping):
        return ", ".join(format_field(name, each) for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(format_value, value))
    return WORDS.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def format_field(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name} {format_value(value)}"


def format_outcome(event: Mapping[str, Any]) -> str:
    replicas = event.get("replicas", {})
    reasons = [f"{at}: {each['reason']}" for at, each in replicas.items() if "reason" in each]
    if reasons and not any(at.endswith((" other", " others")) for at in replicas):
        done = f"{event['outcome']}, done on {len(replicas) - len(reasons)} of {len(replicas)}"
        return "; ".join((done, *reasons))
    return ": ".join(filter(None, (event["outcome"], event.get("reason"))))
