"""Validation of load parameters. A config and files are code that Triton runs, so they need permission."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

# The parameter that is not code.
UNLOAD_DEPENDENTS: Final = "unload_dependents"
# Code: the config, and files within the model's folder.
CONFIG_PARAMETER: Final = "config"
FILE_PARAMETER: Final = re.compile(r"file:(?!\.\.?(?:/|$))[^/\x00]+(?:/(?!\.\.?(?:/|$))[^/\x00]+)*")
# Triton writes the files below a folder in /tmp, and ends if Linux refuses a path: tritonserver 2.51 from
# 4,078 bytes on. The rest is left for other folders.
MAX_FILE_NAME_BYTES: Final = 255
MAX_FILE_PATH_BYTES: Final = 4000


def check_load_parameters(parameters: Mapping[str, Any], *, can_upload: bool) -> None:
    """Check load parameters. Raises `MalformedRequest`, or `Forbidden` for uploads that are not allowed."""
    for name, value in parameters.items():
        if name == UNLOAD_DEPENDENTS:
            if not isinstance(value, bool):
                raise MalformedRequest(f"{name} must be true or false")
            continue
        if not can_upload:
            raise Forbidden(
                f"load parameter {quote_text(name)} is not allowed, because Triton runs it as code; uploads "
                "require GATEWAY_MODEL_UPLOADS=code and a key that may manage all models"
            )
        if name == CONFIG_PARAMETER:
            continue
        if not FILE_PARAMETER.fullmatch(name):
            raise MalformedRequest(
                f"unknown load parameter {quote_text(name)}; valid parameters are config and "
                "file:PATH with a path inside the model's folder"
            )
        check_file_path(name)


def check_file_path(parameter: str) -> None:
    """Check the lengths of a path and of its names. Raises `MalformedRequest`.

    The message begins like Triton's own, where Triton survives it: its example program compares that.
    """
    path = parameter.removeprefix("file:").encode()
    names = path.split(b"/")
    if len(path) > MAX_FILE_PATH_BYTES or max(map(len, names)) > MAX_FILE_NAME_BYTES:
        raise MalformedRequest(
            f"Invalid file path in load parameter {quote_text(parameter)}: it may have "
            f"{MAX_FILE_PATH_BYTES} bytes, and each name in it {MAX_FILE_NAME_BYTES}"
        )
