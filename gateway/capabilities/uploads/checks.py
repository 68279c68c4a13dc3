"""The check of the repository for `triton-gateway doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gateway.capabilities.uploads.model_files.bucket import Bucket
from gateway.capabilities.uploads.settings import UploadSettings
from gateway.capability import FAILED, OK, Finding, describe_error
from gateway.errors import GatewayError
from gateway.messages import CommandError


def check_model_repository(settings: UploadSettings) -> Iterator[Finding]:
    check = "repository"
    folder = settings.repository_folder
    bucket = settings.repository_bucket
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
