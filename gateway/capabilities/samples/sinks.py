"""The sinks of samples: an address that takes CloudEvents over HTTP, and a folder with files."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult

from gateway.capabilities.samples.events import SampleEvent, encode_event_headers, encode_line
from gateway.commands.inference.samples import (
    HOUR_S,
    find_end_time,
    format_file_name,
    list_sample_files,
    lock_folder,
)
from gateway.errors import GatewayError
from gateway.http_client.client import HttpClient

SEND_TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 10
SUCCESS_STATUSES: Final = range(200, 300)
# With these, and those from 500 on, an event can be sent again.
TEMPORARY_STATUSES: Final = (408, 425, 429)
SERVER_ERROR_STATUS: Final = 500
REMOVAL_INTERVAL_S: Final = 60.0


class EventsNotSent(Exception):
    """The sink did not accept events. If that is not final, they can be sent again."""

    def __init__(
        self, message: str, reason: str = "unavailable", *, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_final = is_final


class HttpSink:
    """Sends each event in a request, in the binary mode of CloudEvents."""

    parallel_sends = 8
    bytes_per_send = 0  # one event
    interval_s = 0.0

    def __init__(self, address: SplitResult, token: str) -> None:
        query = f"?{address.query}" if address.query else ""
        self._target = f"{address.path or '/'}{query}".encode()
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        is_encrypted = address.scheme == "https"
        self._client = HttpClient(
            address.hostname or "",
            address.port or (443 if is_encrypted else 80),
            tls=ssl.create_default_context() if is_encrypted else None,
            connect_timeout_s=SEND_TIMEOUT_S,
        )

    async def send(self, events: Sequence[SampleEvent]) -> None:
        """Send one event after the other. Raises `EventsNotSent`."""
        for event in events:
            headers = [*encode_event_headers(event), *self._headers]
            try:
                response = await self._client.request(
                    b"POST",
                    self._target,
                    headers=headers,
                    body=event.data,
                    timeout_s=SEND_TIMEOUT_S,
                    max_bytes=MAX_ANSWER_BYTES,
                )
            except GatewayError as exc:
                raise EventsNotSent(f"{self._client.authority}: {exc.detail}") from None
            check_status(response.status)

    def close(self) -> None:
        self._client.close()


def check_status(status: int) -> None:
    message = f"the sink answered with status {status}"
    if status >= SERVER_ERROR_STATUS or status in TEMPORARY_STATUSES:
        raise EventsNotSent(message)
    if status not in SUCCESS_STATUSES:
        raise EventsNotSent(message, "refused", is_final=True)


class FolderSink:
    """Appends events to a file of JSON lines for each hour (UTC)."""

    parallel_sends = 1
    bytes_per_send = 4 << 20  # of gRPC messages, whose data can become eight times as long
    interval_s = 0.2  # a write of its own for each request would cost more than the request

    def __init__(self, folder: Path, max_age_hours: int, max_bytes: int) -> None:
        """Create the folder. Raises `OSError` if it cannot be written."""
        self._folder = folder
        self._max_age_s = HOUR_S * max_age_hours
        self._max_bytes = max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_folder(folder):
            pass

    async def send(self, events: Sequence[SampleEvent]) -> None:
        """Append the events in a thread. Raises `EventsNotSent`."""
        try:
            await asyncio.to_thread(self._append, events)
        except OSError as exc:
            raise EventsNotSent(f"{self._folder} cannot be written: {exc.strerror}") from None

    def _append(self, events: Sequence[SampleEvent]) -> None:
        with lock_folder(self._folder):
            used_bytes = sum(path.stat().st_size for path in list_sample_files(self._folder))
            if used_bytes + sum(event.size_bytes for event in events) > self._max_bytes:
                message = f"the files in {self._folder} have reached GATEWAY_SAMPLES_MAX_BYTES"
                raise EventsNotSent(message, "folder_full", is_final=True)
            append_lines(self._folder / format_file_name(time.time()), map(encode_line, events))

    async def remove_old_files(self) -> None:
        """Remove the files that are too old, and pause. Raises `OSError`."""
        await asyncio.to_thread(self._remove_old_files)
        await asyncio.sleep(REMOVAL_INTERVAL_S)

    def _remove_old_files(self) -> None:
        with lock_folder(self._folder):
            for path in list_sample_files(self._folder):
                if find_end_time(path) + self._max_age_s < time.time():
                    path.unlink()


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append all lines or, for example on a full disk, none. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    size_bytes = os.fstat(descriptor).st_size
    try:
        for line in lines:
            view = memoryview(line)
            while view:
                view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, size_bytes)
        raise
    finally:
        os.close(descriptor)
