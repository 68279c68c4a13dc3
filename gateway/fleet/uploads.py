"""What a load may bring beside the model's name. A config and files are code, which Triton runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

# What may stand there without being code …
UNLOAD_DEPENDENTS: Final = "unload_dependents"
# … and what is code: the config, and files within the model's folder.
CONFIG_PARAMETER: Final = "config"
FILE_PARAMETER: Final = re.compile(r"file:(?!\.\.?(?:/|$))[^/\x00]+(?:/(?!\.\.?(?:/|$))[^/\x00]+)*")


def check_load_parameters(parameters: Mapping[str, Any], *, can_upload: bool) -> None:
    """Raise `Forbidden` for parameters that bring code without being allowed to, `Malformed` for others."""
    for name, value in parameters.items():
        if name == UNLOAD_DEPENDENTS:
            if not isinstance(value, bool):
                raise MalformedRequest(f"{UNLOAD_DEPENDENTS} must be true or false")
            continue
        if not can_upload:
            raise Forbidden(
                f"a load may not bring {quote_text(name)}, which is code that Triton runs: "
                "uploading is switched "
                "off unless GATEWAY_ALLOW_MODEL_UPLOAD is true and the caller administrates all models"
            )
        if name != CONFIG_PARAMETER and not FILE_PARAMETER.fullmatch(name):
            raise MalformedRequest(
                f"a load may bring config and file:PATH within the model, not {quote_text(name)}"
            )
