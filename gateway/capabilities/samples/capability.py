"""Samples of traffic: a share of the requests and answers, as CloudEvents for an HTTP sink or a folder."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, field_validator

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import CapabilitySettings, CommaSeparated, Settings
from gateway.messages import CommandError
from gateway.tasks import repeat

if TYPE_CHECKING:
    from gateway.services import Services


class SampleSettings(CapabilitySettings):
    samples: str = ""
    """Where samples of inference requests and their answers go, as CloudEvents: an address
    (https://collector.example.com/events) or a folder (file:///var/lib/samples). Empty: no samples."""
    sample_rate: float = Field(0.01, ge=0, le=1)
    """Share of the requests that are sampled, from 0 to 1; gateway.sample_rate in the config.pbtxt of a model
    is that of its requests."""
    samples_redact: CommaSeparated = ()
    """Comma-separated names of inputs and outputs whose values are left out of samples."""
    samples_max_age_hours: int = Field(168, ge=1)
    """Age after which a file of samples, which has those of an hour, is removed."""
    samples_max_bytes: int = Field(10 << 30, ge=1 << 20)
    """Maximum size of the files of samples together; what would exceed it is dropped."""
    samples_token: SecretStr = SecretStr("")
    """Bearer token for the address to which samples are sent."""

    @field_validator("samples")
    @classmethod
    def check_address(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        is_valid = value.startswith("file:///") or (is_address and "@" not in parts.netloc)
        if value and not is_valid:
            raise ValueError("use https://HOST/PATH without a password, or file:///FOLDER")
        return value


def attach_samples(settings: Settings) -> Attachment | None:
    samples = settings.read(SampleSettings)
    if not samples.samples:
        return None
    from gateway.capabilities.samples.delivery import EventQueue, EventSender
    from gateway.capabilities.samples.recorder import SampleRecorder
    from gateway.capabilities.samples.sinks import FolderSink, HttpSink

    recorder = SampleRecorder(samples.sample_rate)
    address = urlsplit(samples.samples)
    folder_sink: FolderSink | None = None
    if address.scheme == "file":
        folder = Path(unquote(address.path))
        try:
            folder_sink = FolderSink(
                folder, samples.samples_max_age_hours, samples.samples_max_bytes
            )
        except OSError as exc:
            raise CommandError(f"GATEWAY_SAMPLES: {folder} is unusable: {exc.strerror}") from None

    async def open_samples(services: Services, stack: AsyncExitStack) -> None:
        sink: FolderSink | HttpSink
        if folder_sink is None:
            sink = HttpSink(address, samples.samples_token.get_secret_value())
            stack.callback(sink.close)
        else:
            sink = folder_sink
            removal = repeat("sample_files", sink.remove_old_files)
            stack.callback(asyncio.create_task(removal).cancel)
        queue = EventQueue(services.metrics.create)
        sender = EventSender(queue, sink, services, frozenset(samples.samples_redact))
        await stack.enter_async_context(sender.run())
        recorder.open(services, queue)

    return Attachment(open=open_samples, recorder=recorder)


CAPABILITY = Capability("samples", attach_samples, settings=SampleSettings)
