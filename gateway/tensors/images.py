"""An encoded image becomes an array: looked at first, decoded second, never silently clipped. Pure."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gateway.errors import BadImage, TooLarge
from gateway.tensors.signature import ImageSpec, Layout

# Pillow opens over forty formats; these are the ones people post, and the best-tried decoders.
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_SIDE = 16_384
SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")

# The limit is ours, and checked before a pixel is decoded; Pillow's own only warns.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class ImageLimits:
    """How large an image may be, in pixels and along a side."""

    max_pixels: int = 25_000_000
    max_side: int = MAX_SIDE


def opened(data: bytes, limits: ImageLimits, name: str) -> Image.Image:
    """The image with its size and mode known and nothing decoded.

    Raises `BadImage`, or `TooLarge` for more pixels than the limit.
    """
    if not data:
        raise BadImage(f"the image for '{name}' is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadImage(f"what came for '{name}' is not an image in JPEG, PNG or WebP") from None
    except (OSError, ValueError, SyntaxError, EOFError):
        raise BadImage(f"the image for '{name}' is damaged") from None
    width, height = image.size
    if width * height > limits.max_pixels:
        raise TooLarge(
            f"the image for '{name}' has {width} × {height} pixels; "
            f"the limit is {limits.max_pixels} pixels"
        )
    if max(width, height) > limits.max_side:
        raise TooLarge(
            f"the image for '{name}' is {width} × {height}; the limit is {limits.max_side} along a side"
        )
    return image


def pixels(image: Image.Image) -> int:
    return image.width * image.height


def decoded(image: Image.Image, spec: ImageSpec, name: str) -> np.ndarray:
    """UINT8 values 0..255 in the layout and size of `spec`; EXIF orientation applied.

    Shape [height, width], [channels, height, width] or [height, width, channels].
    """
    try:
        upright = oriented(image, spec)
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError):
        raise BadImage(f"the image for '{name}' is truncated or damaged") from None
    converted = in_mode(upright, spec.mode)
    size = (
        converted.width if spec.width < 0 else spec.width,
        converted.height if spec.height < 0 else spec.height,
    )
    if size != converted.size:
        converted = converted.resize(size, Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    if spec.layout is Layout.GREY:
        return array
    array = array.reshape(size[1], size[0], -1)
    return array.transpose(2, 0, 1) if spec.layout is Layout.CHANNELS_FIRST else array


def oriented(image: Image.Image, spec: ImageSpec) -> Image.Image:
    """Decoded and upright; a JPEG is decoded at a reduced scale when the model wants a small one."""
    turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientations that swap the sides
    size = (spec.height, spec.width) if turned else (spec.width, spec.height)
    if min(size) > 0 and image.mode in ("L", "RGB"):
        image.draft(image.mode, size)
    image.load()
    return ImageOps.exif_transpose(image)


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """`image` as L, RGB or RGBA: 16 bits scaled, transparency laid on white unless it is wanted."""
    if image.mode in SIXTEEN_BIT_MODES:
        grey = np.asarray(image).astype(np.float64) / 257.0
        image = Image.fromarray(np.rint(grey.clip(0, 255)).astype(np.uint8))
    transparent = "A" in image.getbands() or "transparency" in image.info
    if transparent and mode != "RGBA":
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image if image.mode == mode else image.convert(mode)
