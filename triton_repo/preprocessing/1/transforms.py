"""The preprocessing that config.pbtxt describes, from an encoded image to a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ink import Ink
from .parameters import read, require
from .photo import Photo
from .picture import MOST_PIXELS, FloatArray, decode

TRANSFORMS: dict[str, type[Ink] | type[Photo]] = {"ink": Ink, "photo": Photo}


@dataclass(frozen=True)
class Limits:
    max_pixels: int = 25_000_000

    def __post_init__(self) -> None:
        require(
            1 <= self.max_pixels <= MOST_PIXELS,
            f"max_pixels must be between 1 and {MOST_PIXELS}, not {self.max_pixels}",
        )


@dataclass(frozen=True)
class Preprocessing:
    limits: Limits
    transform: Ink | Photo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.transform.shape

    def __call__(self, data: bytes) -> FloatArray:
        """Return the tensor of one image, without a batch dimension; raise PictureError."""
        return self.transform(decode(data, self.limits.max_pixels, self.transform.draft))


def preprocessing(parameters: Mapping[str, str]) -> Preprocessing:
    """Build the preprocessing from the config's parameters; raise ParameterError."""
    choices = ", ".join(TRANSFORMS)
    remaining = dict(parameters)
    name = remaining.pop("transform", "")
    require(name != "", f"parameter transform is missing; it must be one of {choices}")
    require(name in TRANSFORMS, f"transform must be one of {choices}, not {name!r}")
    limits = {"max_pixels": remaining.pop("max_pixels")} if "max_pixels" in remaining else {}
    return Preprocessing(read(Limits, limits), read(TRANSFORMS[name], remaining))
