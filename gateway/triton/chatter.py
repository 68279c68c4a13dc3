"""What of tritonserver's log a person wants to see, and why it failed."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

import orjson

from gateway.triton.complaints import scrubbed

# glog's prefix: level, month and day, time, thread, file:line]
PREFIX = re.compile(r"^([IWEF])(\d{4}) [\d:.]+ \d+ [\w.]+:\d+\] ?")

# A machine without a GPU says these at every start; they mean nothing.
NOISE = (
    "CudaDriverHelper has not been initialized",
    "unable to create stream for",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory",
    "CUDA memory pool disabled",
    "GPU metrics",
)

ESSENCE = re.compile(r"successfully (un)?loaded '[^']+'|Started (HTTP|GRPC)\w* at ")
LOAD_FAILURE = re.compile(
    r"failed to (?:load|poll model) '(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*)", re.S
)
# How it complains of its command line, before any log.
COMPLAINT = re.compile(r"^(?:error: |\S*tritonserver: |failed to | *what\(\): )")

TOLD = 16  # complaints that are not told twice


@dataclass
class Chatter:
    """Hears the log line by line; remembers each model's reason for not loading."""

    verbose: bool = False  # a person wants every line, as it is
    failures: dict[str, str] = field(default_factory=dict)
    complaint: str = ""
    last: str = "it said nothing"
    _told: deque[str] = field(default_factory=lambda: deque(maxlen=TOLD))

    def hear(self, line: str) -> str | None:
        """The essence of one more line, or None where a person need not see it."""
        essence = self._essence(line)
        return (line or None) if self.verbose else essence

    def _essence(self, line: str) -> str | None:
        self.last = line or self.last
        match = PREFIX.match(line)
        if match is None:
            if not COMPLAINT.match(line):
                return None
            line = line.strip().removeprefix("what():").strip()
            self.complaint = self.complaint or line
            return f"Triton: {line}"
        message = unquoted(line[match.end() :])
        if any(noise in message for noise in NOISE):
            return None
        if failure := LOAD_FAILURE.match(message):
            reason = scrubbed(failure["reason"])
            self.failures[failure["model"]] = reason
            return self._once(f"failed to load '{failure['model']}': {reason}")
        message = " ".join(message.split())
        if match[1] in "EF":
            self.complaint = message
        if match[1] in "WEF":
            return self._once(message)
        if essence := ESSENCE.search(message):
            if essence[0].startswith("successfully"):
                self._told.clear()
            return f"Triton: {message}"
        return None

    def _once(self, trouble: str) -> str | None:
        """In poll mode a model that fails is tried again at every look, and fails in the same words."""
        if trouble in self._told:
            return None
        self._told.append(trouble)
        return f"Triton: {trouble}"

    def forget(self) -> None:
        """The server is up: what it complained of does not explain a later end."""
        self.failures.clear()
        self.complaint = ""


def unquoted(message: str) -> str:
    """Newer Tritons write each message as a JSON string, so that it stays on one line."""
    try:
        return str(orjson.loads(message))
    except orjson.JSONDecodeError:
        return message
