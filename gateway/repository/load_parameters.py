"""Validation of load parameters. A config and files are code that Triton runs, so they need permission."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

# The parameters that are not code.
UNLOAD_DEPENDENTS: Final = "unload_dependents"
STAGED: Final = "staged"
FLAG_PARAMETERS: Final = (UNLOAD_DEPENDENTS, STAGED)
# Code: the config, and files within the model's folder.
CONFIG_PARAMETER: Final = "config"
FILE_PARAMETER: Final = re.compile(r"file:(?!\.\.?(?:/|$))[^/\x00]+(?:/(?!\.\.?(?:/|$))[^/\x00]+)*")


def check_load_parameters(parameters: Mapping[str, Any], *, can_upload: bool) -> None:
    """Raise `Forbidden` for uploads that are not allowed, `MalformedRequest` for invalid parameters."""
    for name, value in parameters.items():
        if name in FLAG_PARAMETERS:
            if not isinstance(value, bool):
                raise MalformedRequest(f"{name} must be true or false")
            continue
        if not can_upload:
            raise Forbidden(
                f"load parameter {quote_text(name)} is not allowed, because Triton runs it as code; uploads "
                "require GATEWAY_MODEL_UPLOADS=code and a key that may manage all models"
            )
        if name != CONFIG_PARAMETER and not FILE_PARAMETER.fullmatch(name):
            raise MalformedRequest(
                f"unknown load parameter {quote_text(name)}; valid parameters are config, staged, and "
                "file:PATH with a path inside the model's folder"
            )
