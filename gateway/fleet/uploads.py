"""What a load may bring beside the model's name. A config and files are code, which Triton runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import Forbidden, Malformed
from gateway.words import quoted

# What may stand there without being code …
DEPENDENTS: Final = "unload_dependents"
# … and what is code: the config, and files within the model's folder.
CONFIG: Final = "config"
FILE: Final = re.compile(r"file:(?!\.\.?(?:/|$))[^/\x00]+(?:/(?!\.\.?(?:/|$))[^/\x00]+)*")


def check_parameters(parameters: Mapping[str, Any], *, uploads: bool) -> None:
    """Raise `Forbidden` for parameters that bring code without being allowed to, `Malformed` for others."""
    for name, value in parameters.items():
        if name == DEPENDENTS:
            if not isinstance(value, bool):
                raise Malformed(f"{DEPENDENTS} must be true or false")
            continue
        if not uploads:
            raise Forbidden(
                f"a load may not bring {quoted(name)}, which is code that Triton runs: uploading is switched "
                "off unless GATEWAY_ALLOW_MODEL_UPLOAD is true and the caller administrates all models"
            )
        if name != CONFIG and not FILE.fullmatch(name):
            raise Malformed(
                f"a load may bring config and file:PATH within the model, not {quoted(name)}"
            )
