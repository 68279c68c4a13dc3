"""Samples of traffic: a share of the requests and answers, which are sent to an address as CloudEvents."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import CapabilitySettings, CommaSeparated, Settings, check_http_url

if TYPE_CHECKING:
    from gateway.services import Services


class SampleSettings(CapabilitySettings):
    samples: str = ""
    """Address to which samples of inference requests and their answers are sent, as CloudEvents
    (https://collector.example.com/events). Empty: no samples."""
    sample_rate: float = Field(0.01, ge=0, le=1)
    """Share of the requests that are sampled, from 0 to 1; gateway.sample_rate in the config.pbtxt of a model
    is that of its requests."""
    samples_redact: CommaSeparated = ()
    """Comma-separated names of models, inputs and outputs: samples of requests and answers with their values
    have no body."""
    samples_token: SecretStr = SecretStr("")
    """Bearer token for the address to which samples are sent."""

    @field_validator("samples")
    @classmethod
    def check_address(cls, value: str) -> str:
        if "@" in value:
            raise ValueError("use https://HOST/PATH without a password")
        return check_http_url(value)


def attach_samples(settings: Settings) -> Attachment | None:
    samples = settings.read(SampleSettings)
    if not samples.samples:
        return None
    from gateway.capabilities.samples.delivery import EventSender
    from gateway.capabilities.samples.recorder import SampleRecorder

    async def open_samples(services: Services, stack: AsyncExitStack) -> None:
        address = urlsplit(samples.samples)
        token = samples.samples_token.get_secret_value()
        sender = EventSender(address, token, services.metrics.create)
        await stack.enter_async_context(sender.run())
        redacted = frozenset(samples.samples_redact)
        recorder = SampleRecorder(services, sender, samples.sample_rate, redacted)
        services.recorders.append(recorder)

    return Attachment(open=open_samples)


CAPABILITY = Capability("samples", attach_samples, settings=SampleSettings)
