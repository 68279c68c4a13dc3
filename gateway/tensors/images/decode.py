"""Inspection and decoding of images (JPEG, PNG, WebP) to arrays. Pure."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from gateway.errors import BadImage, TooLarge
from gateway.messages import quote_text
from gateway.tensors.images.header import ImageHeader, read_image_header, strip_metadata
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec

SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")
MAX_16_BIT: Final = (1 << 16) - 1
# From this EXIF orientation on, width and height are swapped.
FIRST_SIDEWAYS_ORIENTATION: Final = 5
ORIENTATION_TRANSPOSES: Final[Mapping[int, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow raises all of these for damaged files.
PILLOW_ERRORS: Final = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
    ArithmeticError, struct.error,
)  # fmt: skip

# Pillow's own limit is disabled, because it only warns; `inspect_image` checks ours before decoding.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class EncodedImage:
    """An image within the limits that is not decoded yet."""

    data: bytes
    header: ImageHeader


def inspect_image(data: bytes, limits: PayloadLimits, input_name: str) -> EncodedImage:
    """Read the header and check the limits. Raises `BadImage` or `TooLarge`."""
    header = read_image_header(data, input_name)
    if header.pixels > limits.max_image_pixels:
        raise build_size_error(header, input_name, f"{limits.max_image_pixels} pixels")
    if max(header.width, header.height) > limits.max_image_side:
        raise build_size_error(header, input_name, f"{limits.max_image_side} pixels per side")
    return EncodedImage(data, header)


def build_size_error(header: ImageHeader, input_name: str, limit: str) -> TooLarge:
    return TooLarge(
        f"the image for input {quote_text(input_name)} has {header.width} × {header.height} pixels; "
        f"the limit is {limit}"
    )


def decode_image(image: EncodedImage, spec: ImageSpec, input_name: str) -> np.ndarray:
    """Return UINT8 values 0..255 in the layout and size of `spec`, with the EXIF orientation applied.

    The shape is [height, width], [channels, height, width] or [height, width, channels].
    Raises `BadImage`.
    """
    try:
        converted = convert_image_mode(load_upright_image(image, spec), spec.mode)
    except PILLOW_ERRORS:
        raise BadImage(
            f"the image for input {quote_text(input_name)} is truncated or damaged"
        ) from None
    width = converted.width if spec.width < 0 else spec.width
    height = converted.height if spec.height < 0 else spec.height
    if (width, height) != converted.size:
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    if spec.layout is ChannelLayout.GREY:
        return array
    array = array.reshape(height, width, -1)
    return array.transpose(2, 0, 1) if spec.layout is ChannelLayout.CHANNELS_FIRST else array


def load_upright_image(encoded: EncodedImage, spec: ImageSpec) -> Image.Image:
    header = encoded.header
    file = io.BytesIO(strip_metadata(encoded.data, header))
    image = Image.open(file, formats=(header.format,))
    if image.size != (header.width, header.height):
        raise ValueError("the decoder found another size than the inspection")
    is_sideways = header.orientation >= FIRST_SIDEWAYS_ORIENTATION
    size = (spec.height, spec.width) if is_sideways else (spec.width, spec.height)
    if min(size) > 0 and image.mode in ("L", "RGB"):
        image.draft(image.mode, size)  # decodes a JPEG at a reduced scale for a small size
    image.load()
    transpose = ORIENTATION_TRANSPOSES.get(header.orientation)
    return image if transpose is None else image.transpose(transpose)


def convert_image_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to L, RGB or RGBA. 16 bits are scaled to 8; L and RGB are composited over white."""
    if image.mode in SIXTEEN_BIT_MODES:
        # In integers, because floats of 25 million pixels would take 600 MB.
        grey = np.asarray(image).clip(0, MAX_16_BIT).astype(np.uint16)
        image = Image.fromarray((grey // 257 + (grey % 257 > 128)).astype(np.uint8))
    transparent = "A" in image.getbands() or "transparency" in image.info
    if transparent and mode != "RGBA":
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image if image.mode == mode else image.convert(mode)
