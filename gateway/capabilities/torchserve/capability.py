"""TorchServe's API, for programs that were written for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import CapabilitySettings, Settings, split_list


class DialectSettings(CapabilitySettings):
    dialects: Annotated[
        tuple[Literal["torchserve"], ...], NoDecode, BeforeValidator(split_list)
    ] = ()
    """Comma-separated APIs of other servers whose paths are served as well: torchserve."""


def attach_torchserve(settings: Settings) -> Attachment | None:
    if not settings.read(DialectSettings).dialects:
        return None
    from gateway.capabilities.torchserve.routes import ATTACHMENT

    return ATTACHMENT


CAPABILITY = Capability("torchserve", attach_torchserve, settings=DialectSettings)
