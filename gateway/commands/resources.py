"""What the commands show: the documents of a gateway, and the columns and rows of their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson
import typer

from gateway.messages import escape_unprintable, escape_unprintable_json

if TYPE_CHECKING:
    from gateway.client import Client
    from gateway.commands.target import Target

Document: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "tuple[str, ...]"

# JSON has the raw states.
STATE_WORDS: Final = {
    "READY": "ready",
    "UP": "ready",
    "ON_DEMAND": "on demand",
    "UNAVAILABLE": "not loaded",
    "DOWN": "unreachable",
}
FAILED: Final = "failed"
REASON_TEXTS: Final = {"declared": "declared", "on_demand": "on demand"}


@dataclass(frozen=True)
class Resource:
    """A kind of document: the field that has them in a list, and its table."""

    field: str
    columns: Row
    format_row: Callable[[Document], Row]

    def show(
        self, target: Target, verb: str, path: str, body: Document | None = None, *, json: bool
    ) -> None:
        """Send a request, and print the document that it returns, or those of a list."""
        with target.connect() as client:
            response = client.request(verb, path, body)
        is_list = verb == "GET" and path.partition("?")[0].endswith(f"/{self.field}")
        self.print(response[self.field] if is_list else response, json=json)

    def print(self, documents: Iterable[Document] | Document, *, json: bool) -> None:
        from gateway.commands import tables

        if json:
            tables.print_json(documents)
            return
        rows = [documents] if isinstance(documents, Mapping) else documents
        tables.print_table(self.columns, map(self.format_row, rows))

    def print_line(self, document: Document, *, json: bool) -> None:
        text = orjson.dumps(document).decode() if json else "  ".join(self.format_row(document))
        typer.echo(escape_unprintable_json(text) if json else escape_unprintable(text))


def format_state(state: str) -> str:
    return STATE_WORDS.get(state, state.lower())


def format_state_counts(states: Iterable[str]) -> str:
    # such as "3 ready, 1 loading"
    counts = Counter(states).most_common()
    return ", ".join(f"{count} {format_state(state)}" for state, count in counts)


def describe_model_state(model: Document) -> str:
    states = list(model.get("replicas", {}).values())
    states += [version.get("state", "") for version in model["versions"]]
    if model["ready"]:
        count = len(model.get("replicas", {}))
        ready = states.count("READY")
        return f"ready on {ready} of {count}" if ready < count else "ready"
    if "last_error" in model:
        return FAILED
    return format_state("LOADING" if "LOADING" in states else "".join(states[:1]) or "UNAVAILABLE")


def format_model_row(model: Document) -> Row:
    state = describe_model_state(model)
    versions = []
    for version in model["versions"]:
        each = format_state(version.get("state", ""))
        shown = "" if each == state else each
        versions.append(f"{version.get('version', '')} {shown}".strip())
    reasons = [REASON_TEXTS[field] for field in REASON_TEXTS if field in model]
    if "last_error" in model:
        reasons.append(model["last_error"])
    if "wished" in model:
        missing = model["wished"] == "loaded" and not model["ready"]
        reasons.insert(0, f"{'to be ' * missing}{model['wished']} by the API")
    if "behind" in model:
        reasons.append(f"outdated load on {', '.join(model['behind'])}")
    replicas = format_state_counts(model.get("replicas", {}).values())
    return model["name"], state, ", ".join(versions), replicas, "; ".join(reasons)


def format_replica_row(replica: Document) -> Row:
    reason = replica.get("reason", "")
    if "ejected_for_s" in replica:
        reason = f"ejected for {replica['ejected_for_s']:g} s; {reason}"
    if "failing_models" in replica:
        reason = f"fails requests of {', '.join(replica['failing_models'])}; {reason}".rstrip("; ")
    cordon = ", cordoned" if replica.get("cordoned") else ""
    return (
        replica["address"],
        f"{format_state(replica['state'])}{cordon}",
        str(replica["outstanding"]),
        format_state_counts(replica["models"].values()),
        reason,
    )


def format_job_row(job: Document) -> Row:
    progress = job["progress"]
    counts = f"{progress['done']} of {progress['total']}"
    if progress["failed"]:
        counts += f", {progress['failed']} failed"
    reason = job.get("error", {}).get("message", "")
    if "position" in job:
        reason = f"{job['position']} jobs before it"
    return job["id"], job["state"], job["model"], counts, job["created"], reason


def format_label_row(label: Document) -> Row:
    shares = label.get("versions") or {label.get("version", ""): 1}
    total = sum(shares.values())
    parts = [f"{each}: {100 * share / total:.4g} %" for each, share in shares.items()]
    versions = ", ".join(parts) if len(parts) > 1 else next(iter(shares))
    shadow = label.get("shadow")
    shadowed = f"{shadow['version']}: {shadow['percent']:g} %" if shadow else ""
    missing = ", ".join(each for each, is_ready in label["ready"].items() if not is_ready)
    return label["model"], label["label"], versions, shadowed, missing


def format_event_row(event: Document) -> Row:
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
        return " ".join(map(format_value, value)) or "none"
    return "none" if value is None else str(value)


def format_field(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name} {format_value(value)}"


def format_outcome(event: Document) -> str:
    replicas = event.get("replicas", {})
    reasons = [f"{at}: {each['reason']}" for at, each in replicas.items() if "reason" in each]
    if reasons and not any(at.endswith((" other", " others")) for at in replicas):
        done = f"{event['outcome']}, done on {len(replicas) - len(reasons)} of {len(replicas)}"
        return "; ".join((done, *reasons))
    return ": ".join(filter(None, (event["outcome"], event.get("reason"))))


def format_report_rows(report: Document) -> list[Row]:
    model = report["model"]
    return [
        (model, at, format_state(replica["state"]), replica.get("reason", ""))
        for at, replica in report["replicas"].items()
    ]


def read_readiness(client: Client) -> Document:
    """Return the document of `/readyz`. Raises `GatewayError`."""
    from gateway.client import GatewayError

    try:
        return client.request("GET", "/readyz")
    except GatewayError as exc:
        if "ready" not in exc.document:
            raise
        return exc.document


def describe_readiness(readiness: Document) -> str:
    missing = ", ".join(readiness.get("missing") or {})
    if readiness["ready"]:
        return f"ready, but {missing} cannot be served" if missing else "ready"
    if readiness.get("draining"):
        return "not ready: the gateway is shutting down"
    if "replicas" not in readiness:
        return "not ready; a key with the role admin sees why"
    if missing:
        return f"not ready: {missing} cannot be served"
    states = readiness["replicas"].items()  # none of them can serve requests
    unusable = ", ".join(f"{address} is {state}" for address, state in states)
    return f"not ready: {unusable or 'no replica is available'}"


MODELS: Final = Resource(
    "models", ("MODEL", "STATE", "VERSIONS", "REPLICAS", "REASON"), format_model_row
)
REPLICAS: Final = Resource(
    "replicas", ("REPLICA", "STATE", "IN FLIGHT", "MODELS", "REASON"), format_replica_row
)
JOBS: Final = Resource(
    "jobs", ("JOB", "STATE", "MODEL", "PROGRESS", "CREATED", "REASON"), format_job_row
)
LABELS: Final = Resource(
    "labels", ("MODEL", "LABEL", "VERSIONS", "SHADOW", "NOT READY"), format_label_row
)
EVENTS: Final = Resource("events", ("TIME", "WHO", "WHAT", "CHANGES", "OUTCOME"), format_event_row)
REPORT_COLUMNS: Final = ("MODEL", "REPLICA", "STATE", "REASON")
