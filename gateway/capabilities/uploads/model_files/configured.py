"""The store of the configured repository."""

from __future__ import annotations

from gateway.capabilities.uploads.model_files.bucket_store import BucketStore
from gateway.capabilities.uploads.model_files.folder_store import FolderStore
from gateway.capabilities.uploads.model_files.store import ModelStore
from gateway.capabilities.uploads.settings import UploadSettings


def create_model_store(settings: UploadSettings, *, can_write: bool) -> ModelStore | None:
    """Return the store of GATEWAY_REPOSITORY; None without it. Raises `CannotUseBucket`."""
    max_bytes = settings.max_repository_bytes
    if (folder := settings.repository_folder) is not None:
        return FolderStore(folder, can_write=can_write, max_bytes=max_bytes)
    if (bucket := settings.repository_bucket) is not None:
        return BucketStore(bucket, can_write=can_write, max_bytes=max_bytes)
    return None
