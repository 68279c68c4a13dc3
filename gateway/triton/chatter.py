"""What of tritonserver's log a person wants to see, and why it failed."""

from __future__ import annotations

import re
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
LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)", re.S)
# How it complains of its command line, before any log.
COMPLAINT = re.compile(r"^(?:error: |\S*tritonserver: |failed to )")


@dataclass
class Chatter:
    """Hears the log line by line; remembers each model's reason for not loading."""

    failures: dict[str, str] = field(default_factory=dict)
    complaint: str = ""
    last: str = "it said nothing"

    def hear(self, line: str) -> str | None:
        """The essence of one more line, or None where a person need not see it."""
        self.last = line or self.last
        match = PREFIX.match(line)
        if match is None:
            if not COMPLAINT.match(line):
                return None
            self.complaint = self.complaint or line
            return f"Triton: {line}"
        message = unquoted(line[match.end() :])
        if any(noise in message for noise in NOISE):
            return None
        if failure := LOAD_FAILURE.match(message):
            reason = scrubbed(failure["reason"])
            self.failures[failure["model"]] = reason
            return f"Triton: failed to load '{failure['model']}': {reason}"
        if match[1] in "EF":
            self.complaint = " ".join(message.split())
        if match[1] in "WEF" or ESSENCE.search(message):
            return f"Triton: {' '.join(message.split())}"
        return None

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
