"""The command `events`: what changed, by whom, and with which outcome."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

import orjson
import typer

from gateway.commands.resources import EVENTS
from gateway.messages import escape_unprintable, escape_unprintable_json

if TYPE_CHECKING:
    from gateway.client import Client

POLL_S: Final = 2.0
AGE: Final = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def print_events(client: Client, since: str, limit: int, *, follow: bool, json: bool) -> None:
    """Print the events; if `follow` is set, one in each line, and later ones as they come."""
    page = client.events(parse_since(since), limit=limit)
    if not follow:
        EVENTS.print(page["events"], json=json)
    while follow:
        for event in page["events"]:
            if json:
                typer.echo(escape_unprintable_json(orjson.dumps(event).decode()))
            else:
                typer.echo(escape_unprintable("  ".join(EVENTS.format_row(event))))
        if not page["events"]:
            time.sleep(POLL_S)
        page = client.events(page["next"], limit=limit)


def parse_since(since: str) -> str | datetime:
    """Return the time of an age such as 5m; the gateway reads everything else."""
    match = AGE.fullmatch(since)
    if match is None:
        return since
    return datetime.now(timezone.utc) - timedelta(**{UNITS[match[2]]: int(match[1])})
