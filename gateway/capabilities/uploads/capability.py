"""Uploads, downloads and removals of models in the repository that the Tritons serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.capabilities.capability import (
    FAILED,
    OK,
    Attachment,
    Capability,
    Finding,
    LaunchPlan,
    describe_error,
)
from gateway.capabilities.uploads.settings import REPOSITORY_URL_EXCLUSIONS, UploadSettings
from gateway.config.settings import ModelUploads, Settings
from gateway.errors import GatewayError
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.capabilities.uploads.model_files.store import ModelStore
    from gateway.services import Services

log = logging.getLogger(__name__)


def attach_uploads(settings: Settings) -> Attachment:
    """Build the routes of uploads, and the store behind them. Raises `CannotUseBucket`."""
    from gateway.capabilities.uploads.publisher import ModelPublisher
    from gateway.capabilities.uploads.routes import router

    upload_settings = settings.read(UploadSettings)
    can_write = settings.model_uploads is not ModelUploads.off
    files = create_model_store(upload_settings)

    async def open_publisher(services: Services, stack: AsyncExitStack) -> None:
        if files is not None:
            if can_write and not services.repository.state.store.is_shared:
                log.info(
                    "no other gateway may upload to %s: gateways that share a repository must share their "
                    "state, and this one's state is its own (GATEWAY_STATE)",
                    upload_settings.repository,
                )
            publisher = ModelPublisher(files, services.repository, services.resolver)
            if can_write:
                await files.run(files.open)
            stack.callback(files.close)
            stack.push_async_callback(publisher.close)
            services.provide(publisher)
            services.provide(upload_settings)

    return Attachment((router,), open=open_publisher)


def create_model_store(settings: UploadSettings) -> ModelStore | None:
    """Return the store of GATEWAY_REPOSITORY; None without it. Raises `CannotUseBucket`."""
    from gateway.capabilities.uploads.model_files.bucket import Bucket
    from gateway.capabilities.uploads.model_files.folder import ModelFolder
    from gateway.capabilities.uploads.model_files.store import ModelStore

    files: Bucket | ModelFolder
    if (folder := settings.repository_folder) is not None:
        files = ModelFolder(folder)
    elif (bucket := settings.repository_bucket) is not None:
        files = Bucket(bucket)
    else:
        return None
    return ModelStore(files, settings.max_repository_bytes)


def check_uploads(settings: Settings) -> Iterator[Finding]:
    from gateway.capabilities.uploads.model_files.bucket import Bucket

    check = "repository"
    upload_settings = settings.read(UploadSettings)
    folder = upload_settings.repository_folder
    bucket = upload_settings.repository_bucket
    if bucket is not None:
        try:
            Bucket(bucket).list_top_level()
        except (CommandError, GatewayError) as exc:
            advice = "see GATEWAY_REPOSITORY in docs/reference/settings.md"
            yield Finding(check, FAILED, describe_error(exc), advice)
        else:
            yield Finding(check, OK, f"bucket {bucket.bucket} can be listed")
    elif folder is None:
        yield Finding(check, OK, "not set: models cannot be uploaded; up sets it")
    elif not folder.is_dir():
        advice = "create it, or correct GATEWAY_REPOSITORY"
        yield Finding(check, FAILED, f"{folder} is not a folder", advice)
    elif not os.access(folder, os.W_OK | os.X_OK):
        advice = f"let user {os.getuid()} write to it"
        yield Finding(check, FAILED, f"{folder} cannot be written", advice)
    else:
        yield Finding(check, OK, f"{folder} can be written")


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
