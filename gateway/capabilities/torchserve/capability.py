"""TorchServe's API, for programs that were written for it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import CapabilitySettings, Settings, split_list


class Dialect(str, Enum):
    """The APIs of other servers with paths of their own, outside `/v1` and `/v2`."""

    torchserve = "torchserve"


class DialectSettings(CapabilitySettings):
    dialects: Annotated[tuple[Dialect, ...], NoDecode, BeforeValidator(split_list)] = ()
    """Comma-separated APIs of other servers whose paths are served as well: torchserve."""


def attach_torchserve(settings: Settings) -> Attachment | None:
    if Dialect.torchserve not in settings.read(DialectSettings).dialects:
        return None
    from gateway.capabilities.torchserve.routes import (
        ERROR_SERIALIZERS,
        PATH_RULES,
        TORCHSERVE_ERROR_SCHEMA,
        router,
    )

    return Attachment(
        (router,),
        {"TorchServeError": TORCHSERVE_ERROR_SCHEMA},
        error_serializers=ERROR_SERIALIZERS,
        paths=PATH_RULES,
    )


CAPABILITY = Capability("torchserve", attach_torchserve, settings=DialectSettings)
