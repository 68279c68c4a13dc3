"""Uploads, downloads and removals of models in the repository that the Tritons serve."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack

from gateway.capability import Attachment, Capability, Finding
from gateway.services import Services
from gateway.settings import Settings


def attach_uploads(settings: Settings) -> Attachment:
    """Raises `CannotUseBucket`."""
    from gateway.capabilities.uploads.model_files.configured import create_model_store
    from gateway.capabilities.uploads.publisher import ModelPublisher
    from gateway.capabilities.uploads.routes import router

    files = create_model_store(settings)

    async def open_publisher(services: Services, stack: AsyncExitStack) -> None:
        if files is not None:
            publisher = ModelPublisher(files, services.repository)
            await files.run(files.open)
            stack.callback(files.close)
            stack.push_async_callback(publisher.close)
            publisher.start()
            services.provide(publisher)

    return Attachment((router,), open=open_publisher)


def check_uploads(settings: Settings) -> Iterable[Finding]:
    from gateway.capabilities.uploads.checks import check_model_repository

    return check_model_repository(settings)


CAPABILITY = Capability("uploads", attach_uploads, check_uploads)
