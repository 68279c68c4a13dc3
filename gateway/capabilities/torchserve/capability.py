"""TorchServe's API, for programs that were written for it."""

from __future__ import annotations

from gateway.capability import Attachment, Capability
from gateway.settings import Settings
from gateway.settings.server import Dialect


def attach_torchserve(settings: Settings) -> Attachment | None:
    if Dialect.torchserve not in settings.dialects:
        return None
    from gateway.capabilities.torchserve.description import TORCHSERVE_ERROR_SCHEMA
    from gateway.capabilities.torchserve.routes import TorchServeErrors, router

    return Attachment((router,), {"TorchServeError": TORCHSERVE_ERROR_SCHEMA}, TorchServeErrors)


CAPABILITY = Capability("torchserve", attach_torchserve)
