"""What an event may cost, compared with what the load saw; and the table of all events. No I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tests.support.servers import FAULTS

# From the moment when all pods are ready until the fleet is as desired: gateways look up the Tritons every
# 5 s. A DNS that keeps answers needs more: `--settle`.
SETTLE_S: Final = 15.0
# Of a request that nothing disturbs, on a busy machine: `--slow`.
SLOW_S: Final = 5.0
MOST_EXAMPLES: Final = 3
MOST_REASON_CHARACTERS: Final = 200


class Losses(Enum):
    """Which requests may fail."""

    none = "none"
    # Those that were in a Triton when it died.
    requests_inside = "requests in progress"
    # Those on a connection to a gateway that died, also later ones on the same connection. A new one may
    # be refused, because nobody could announce it; the client's next attempt must succeed.
    connections_inside = "requests on connections that were open"


@dataclass(frozen=True)
class Failure:
    """A request that failed, by the clock of the load."""

    kind: str
    connected: float
    began: float
    ended: float
    reason: str


@dataclass(frozen=True)
class Record:
    """What the load saw in a period."""

    answered: Counter[str]
    failures: tuple[Failure, ...] = ()
    refused: tuple[Failure, ...] = ()  # connections; the request went on with another one
    slow: tuple[Failure, ...] = ()  # they were answered
    longest_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.answered.total() + len(self.failures)


def parse_record(lines: Iterable[str], after: float, until: float) -> Record:
    """Return what the lines of the load say of the time after `after`, up to and including `until`."""
    answered: Counter[str] = Counter()
    found: dict[str, list[Failure]] = {"failed": [], "refused": [], "slow": []}
    longest_s = 0.0
    for line in lines:
        fields = json.loads(line)
        ended = fields.pop("at" if "at" in fields else "ended")
        if not after < ended <= until:
            continue
        if "answered" in fields:
            answered.update(fields["answered"])
            longest_s = max(longest_s, fields["longest_s"])
            continue
        (what,) = found.keys() & fields.keys()
        found[what].append(Failure(kind=fields.pop(what), ended=ended, **fields))
    failures, refused, slow = map(tuple, found.values())
    return Record(answered, failures, refused, slow, longest_s)


def find_oldest_request(line: str) -> float | None:
    """Return when the oldest request began that is in progress, if the line counts responses."""
    oldest: float | None = json.loads(line).get("oldest")
    return oldest


@dataclass(frozen=True)
class Outcome:
    """An event, and what became of it. The times of the fault are by the clock of the load."""

    name: str
    losses: Losses
    record: Record | None = None  # None: without load
    well_s: float = 0.0  # from the beginning of the event until everything was well
    settled_s: float = 0.0  # from the moment when all pods were ready
    settle_limit_s: float = SETTLE_S
    fault_ended: float = 0.0
    # For so long after the fault, requests may still reach what was stopped: until a probe has noticed.
    unnoticed_s: float = 0.0
    differences: tuple[str, ...] = ()  # from what the fleet should be, when the patience ended
    log_faults: tuple[str, ...] = ()
    skipped: str = ""  # the reason


def is_excused(outcome: Outcome, failure: Failure) -> bool:
    """Return whether the request was inside what died."""
    last = outcome.fault_ended + outcome.unnoticed_s
    if outcome.losses is Losses.requests_inside:
        return failure.began <= last
    return outcome.losses is Losses.connections_inside and failure.connected <= last


def find_violations(outcome: Outcome) -> list[str]:
    """Return a sentence for each promise that was broken."""
    if outcome.skipped:
        return []
    found = [*outcome.differences, *outcome.log_faults]
    if outcome.settled_s > outcome.settle_limit_s:
        found.append(
            f"the fleet was as desired {outcome.settled_s:.0f} s after the pods were ready, "
            f"not within {outcome.settle_limit_s:.0f} s"
        )
    record = outcome.record
    if record is None:
        return found
    if not record.answered.total():
        found.append("no request was answered")
    if lost := [each for each in record.failures if not is_excused(outcome, each)]:
        found.append(f"{len(lost)} requests failed that must not: {format_examples(lost)}")
    if slow := [each for each in record.slow if not is_excused(outcome, each)]:
        found.append(f"{len(slow)} requests were slow: {format_examples(slow)}")
    if outcome.losses is not Losses.connections_inside and record.refused:
        found.append(
            f"{len(record.refused)} connections were refused: {format_examples(record.refused)}"
        )
    return found


def format_examples(failures: Sequence[Failure]) -> str:
    counts = Counter(f"{each.kind}: {each.reason[:MOST_REASON_CHARACTERS]}" for each in failures)
    return "; ".join(f"{count} × {text}" for text, count in counts.most_common(MOST_EXAMPLES))


HEADINGS: Final = (
    "event",
    "requests",
    "failed",
    "refused",
    "longest, seconds",
    "seconds until well",
    "after the pods",
    "result",
)


def list_cells(outcome: Outcome) -> tuple[str, ...]:
    if outcome.skipped:
        return (outcome.name, "", "", "", "", "", "", f"skipped: {outcome.skipped}")
    result = "VIOLATED" if find_violations(outcome) else "ok"
    well_s = f"{outcome.well_s:.0f}"
    record = outcome.record
    if record is None:
        return (outcome.name, "", "", "", "", well_s, "", result)
    failed = str(len(record.failures))
    if inside := sum(is_excused(outcome, failure) for failure in record.failures):
        failed += f" ({inside} inside)"
    return (
        outcome.name,
        f"{record.requests:,}",
        failed,
        str(len(record.refused)),
        f"{record.longest_s:.1f}",
        well_s,
        f"{outcome.settled_s:.0f}",
        result,
    )


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown that also reads well on a terminal."""
    rows = [HEADINGS, *map(list_cells, outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [format_row(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True))
    return f"|{'|'.join(padded)}|"


def format_violations(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(
        f"* {outcome.name}: {violation}"
        for outcome in outcomes
        for violation in find_violations(outcome)
    )


LOG_FAULTS: Final = ("Traceback (most recent call last)", *FAULTS)


def find_log_faults(text: str) -> list[str]:
    """Return a sentence for each fault that a log shows, with the line."""
    return [
        f"a log has: {line.strip()[:MOST_REASON_CHARACTERS]}"
        for line in text.splitlines()
        if any(words in line for words in LOG_FAULTS)
    ]
