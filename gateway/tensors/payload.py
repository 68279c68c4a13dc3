"""The content of a request: named parts. Pure.

The value of a part is `bytes`, `str`, a NumPy array or a JSON value (a number, a boolean, or nested lists of
these, of strings and of bytes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gateway.errors import MalformedRequest

# tritonserver searches names one after the other, and takes minutes for many or long ones.
MAX_PARAMETERS: Final = 1000
MAX_PARAMETER_NAME_CHARS: Final = 256


@dataclass(frozen=True)
class PayloadLimits:
    """The limits of a request body, and of the images in it."""

    max_bytes: int = 64 << 20
    max_parts: int = 128
    max_json_memory_bytes: int = 1 << 30
    # The limit applies to one image, and to all decoded ones together.
    max_image_pixels: int = 25_000_000
    max_image_side: int = 16_384
    # What decoding the images of an input may cost where it cannot be stopped.
    max_cost_pixels: float = math.inf
    max_inferences: int = 2048


NO_PARAMETERS: Final[Mapping[str, Any]] = {}


class TooManyParameters(MalformedRequest):
    message = f"a request can have at most {MAX_PARAMETERS} parameters"


def check_parameter_limits(parameters: Mapping[str, Any]) -> None:
    """Check the number of parameters and the length of their names. Raises `MalformedRequest`."""
    if len(parameters) > MAX_PARAMETERS:
        raise TooManyParameters
    if parameters and max(map(len, parameters)) > MAX_PARAMETER_NAME_CHARS:
        raise MalformedRequest(
            f"a parameter name can have at most {MAX_PARAMETER_NAME_CHARS} characters"
        )


class Part(NamedTuple):
    """One value with its metadata."""

    value: Any
    content_type: str = ""


class PayloadOptions(NamedTuple):
    """The outputs, parameters and id that a body asks for."""

    outputs: tuple[str, ...] = ()  # empty means all
    parameters: Mapping[str, Any] = NO_PARAMETERS
    id: str = ""


class Payload(NamedTuple):
    """The content of a request: lists of parts by name, several if a form field is repeated.

    The name is "" for a value without a name, which is valid if the model has one required input.
    """

    parts: Mapping[str, list[Part]]
    options: PayloadOptions = PayloadOptions()
    # More than 0 if each part is one item of a batch, even if there is only one.
    instance_count: int = 0
