"""A filter for tritonserver's log that keeps progress, warnings and the reasons of failures."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from gateway.triton.error_mapping import sanitize_message

# glog's prefix: level, month and day, time, thread, file:line]
GLOG_PREFIX = re.compile(r"^([IWEF])(\d{4}) [\d:.]+ \d+ [\w.]+:\d+\] ?")

# Devices of NVIDIA's driver, also on Windows (WSL).
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
# Triton logs these at every start without a GPU. On a machine with one, they say why Triton does not use it.
MESSAGES_WITHOUT_GPU = (
    "CudaDriverHelper has not been initialized",
    "unable to create stream for",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory",
    "CUDA memory pool disabled",
    "GPU metrics",
)

PROGRESS_MESSAGE = re.compile(r"successfully (un)?loaded '[^']+'|Started (HTTP|GRPC)\w* at ")
LOAD_FAILURE = re.compile(
    r"failed to (?:load|poll model) '(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*)", re.S
)
# What to do about failures that Triton explains only to those who know it.
FAILURE_ADVICE = {
    "has kind KIND_GPU but no GPUs are available": "without the kind, Triton uses a GPU only if there is "
    "one; see triton-gateway doctor",
    "Could not determine backend for model": "its version folder must contain model.onnx or model.py, or its "
    "config must name the backend",
}
# Triton prints errors in its command line before it sets up its log.
COMMAND_LINE_ERROR = re.compile(r"^(?:error: |\S*tritonserver: |failed to | *what\(\): )")

MAX_REMEMBERED_MESSAGES = 16  # messages that are not repeated


def has_gpu_driver() -> bool:
    return any(Path(device).exists() for device in GPU_DEVICES)


@dataclass
class LogFilter:
    """Filters the log line by line, and collects the reason of each model that failed to load."""

    verbose: bool = False  # pass every line unchanged
    has_gpu: bool = field(default_factory=has_gpu_driver)
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""
    last_line: str = "no output"
    _recent_messages: deque[str] = field(
        default_factory=lambda: deque(maxlen=MAX_REMEMBERED_MESSAGES)
    )

    def filter_line(self, line: str) -> str | None:
        summary = self._summarize_line(line)
        return (line or None) if self.verbose else summary

    def _summarize_line(self, line: str) -> str | None:
        self.last_line = line or self.last_line
        match = GLOG_PREFIX.match(line)
        if match is None:
            if not COMMAND_LINE_ERROR.match(line):
                return None
            line = line.strip().removeprefix("what():").strip()
            self.error = self.error or line
            return f"Triton: {line}"
        message = unquote_message(line[match.end() :])
        if not self.has_gpu and any(each in message for each in MESSAGES_WITHOUT_GPU):
            return None
        if failure := LOAD_FAILURE.match(message):
            reason = add_advice(sanitize_message(failure["reason"]))
            self.failures[failure["model"]] = reason
            return self._report_once(f"failed to load '{failure['model']}': {reason}")
        message = " ".join(message.split())
        if match[1] in "EF":
            self.error = message
        if match[1] in "WEF":
            return self._report_once(message)
        if summary := PROGRESS_MESSAGE.search(message):
            if summary[0].startswith("successfully"):
                self._recent_messages.clear()
            return f"Triton: {message}"
        return None

    def _report_once(self, message: str) -> str | None:
        # In poll mode Triton retries a failed model at every scan, with the same message.
        if message in self._recent_messages:
            return None
        self._recent_messages.append(message)
        return f"Triton: {message}"

    def clear_failures(self) -> None:
        # Failures before the server was ready do not explain a later exit.
        self.failures.clear()
        self.error = ""


def add_advice(reason: str) -> str:
    advice = (text for pattern, text in FAILURE_ADVICE.items() if pattern in reason)
    return "; ".join([reason, *advice])


def unquote_message(message: str) -> str:
    # Newer Tritons log each message as a JSON string, to keep it on one line.
    try:
        return str(orjson.loads(message))
    except orjson.JSONDecodeError:
        return message
