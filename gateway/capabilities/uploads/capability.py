"""Uploads, downloads and removals of models in the repository that the Tritons serve."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.capabilities.uploads.settings import REPOSITORY_URL_EXCLUSIONS, UploadSettings
from gateway.capability import Attachment, Capability, Finding, LaunchPlan
from gateway.settings import Settings
from gateway.settings.access import ModelUploads

if TYPE_CHECKING:
    from gateway.services import Services


def attach_uploads(settings: Settings) -> Attachment:
    """Build the routes of uploads, and the store behind them. Raises `CannotUseBucket`."""
    from gateway.capabilities.uploads.model_files.configured import create_model_store
    from gateway.capabilities.uploads.publisher import ModelPublisher
    from gateway.capabilities.uploads.routes import router

    upload_settings = settings.read(UploadSettings)
    can_write = settings.accepted_uploads is not ModelUploads.off
    files = create_model_store(upload_settings, can_write=can_write)

    async def open_publisher(services: Services, stack: AsyncExitStack) -> None:
        if files is not None:
            publisher = ModelPublisher(files, services.repository)
            await files.run(files.open)
            stack.callback(files.close)
            stack.push_async_callback(publisher.close)
            publisher.start()
            services.provide(publisher)
            services.provide(upload_settings)

    return Attachment((router,), open=open_publisher)


def check_uploads(settings: Settings) -> Iterable[Finding]:
    from gateway.capabilities.uploads.checks import check_model_repository

    return check_model_repository(settings.read(UploadSettings))


def prepare_uploads(plan: LaunchPlan) -> None:
    """Let models be uploaded to the first folder of models of `up`.

    Without keys, only local programs of the same user may upload, and only data.
    """
    from gateway.embedded.model_paths import is_repository_folder
    from gateway.embedded.options import ModelControl

    if not plan.tritons or plan.tritons[0].model_control is not ModelControl.explicit:
        return
    folders = list(filter(is_repository_folder, plan.tritons[0].model_repositories))
    if not folders:
        return
    url = f"file://{Path(folders[0]).absolute()}"
    if REPOSITORY_URL_EXCLUSIONS & set(url):
        return
    if "GATEWAY_REPOSITORY" not in os.environ:
        plan.update_settings(repository=url)
    if "GATEWAY_MODEL_UPLOADS" not in os.environ:
        plan.update_settings(model_uploads=ModelUploads.artifacts)


CAPABILITY = Capability(
    "uploads",
    attach_uploads,
    check_uploads,
    settings=UploadSettings,
    prepare_launch=prepare_uploads,
)
