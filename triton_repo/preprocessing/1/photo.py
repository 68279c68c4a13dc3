"""A transform for ImageNet networks that resizes, crops, scales and normalises an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from .parameters import require
from .picture import Draft, FloatArray

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
CHANNELS = {"L": 1, "RGB": 3}


@dataclass(frozen=True)
class Photo:
    """Convert an image to [channels, height, width] or, as NHWC, [height, width, channels].

    `crop` resizes the shorter side to `resize` and crops the centre; `stretch` resizes the whole
    image and ignores its aspect ratio. A value is (pixel * scale - mean) / std.
    """

    fit: Literal["crop", "stretch"] = "crop"
    resize: int = 256
    width: int = 224
    height: int = 224
    color: Literal["L", "RGB"] = "RGB"
    resample: Literal["bilinear", "bicubic"] = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    layout: Literal["NCHW", "NHWC"] = "NCHW"

    def __post_init__(self) -> None:
        for name in ("resize", "width", "height"):
            value = getattr(self, name)
            require(1 <= value <= 4096, f"{name} must be between 1 and 4096, not {value}")
        if self.fit == "crop":
            require(
                self.resize >= max(self.width, self.height),
                f"resize ({self.resize}) must not be less than width and height",
            )
        channels = CHANNELS[self.color]
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            require(
                count == channels,
                f"{name} must have {channels} numbers for the color {self.color}, not {count}",
            )
        require(min(map(abs, self.std)) > 0, "std must not be zero")

    @property
    def shape(self) -> tuple[int, ...]:
        channels = CHANNELS[self.color]
        if self.layout == "NCHW":
            return (channels, self.height, self.width)
        return (self.height, self.width, channels)

    @property
    def draft(self) -> Draft:
        side = self.resize if self.fit == "crop" else max(self.width, self.height)
        return Draft(self.color, side)

    def __call__(self, picture: Image.Image) -> FloatArray:
        image = picture.convert(self.color).resize(
            (self.width, self.height), RESAMPLING[self.resample], box=self._box(*picture.size)
        )
        pixels = np.asarray(image, dtype=np.float32).reshape(self.height, self.width, -1)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = (pixels * np.float32(self.scale) - mean) / std
        return values if self.layout == "NHWC" else np.ascontiguousarray(values.transpose(2, 0, 1))

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        # The box is the crop of torchvision's transforms in the original pixels. Resizing only this box
        # bounds the work for any aspect ratio.
        if self.fit == "stretch":
            return (0, 0, width, height)
        shorter = min(width, height)
        wide, high = self.resize * width // shorter, self.resize * height // shorter
        left, top = round((wide - self.width) / 2), round((high - self.height) / 2)
        x, y = width / wide, height / high
        return (left * x, top * y, (left + self.width) * x, (top + self.height) * y)
