"""Decoding of uploaded images to upright, opaque images with 8 bits per channel."""

from __future__ import annotations

import struct
import warnings
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

FloatArray = npt.NDArray[np.float32]

# Pillow supports more than forty formats; these three are the most common and the best tested.
FORMATS = ("JPEG", "PNG", "WEBP")

# Pillow's default limit, above which it does not open an image.
MOST_PIXELS = 178_956_970

JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"

ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow raises these for damaged files, according to tests with mutated files.
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, struct.error)


class PictureError(ValueError):
    """The bytes are not a usable image; the message is for the client."""


class Draft(NamedTuple):
    """The smallest size that a transform needs, so that a JPEG can be decoded at a reduced scale."""

    mode: str
    side: int


def decode(data: bytes, max_pixels: int, draft: Draft | None = None) -> Image.Image:
    """Return the image in mode L or RGB; raise PictureError.

    The size is checked before decoding, because a PNG of a few kilobytes can declare gigabytes.
    """
    if not data:
        raise PictureError("the image is empty")
    image = _opened(data, max_pixels)
    width, height = image.size
    if width * height > max_pixels:
        raise PictureError(
            f"the image is too large: it has {width} x {height} pixels; "
            f"the limit is {max_pixels} pixels"
        )
    if draft is not None:
        image.draft(draft.mode, (draft.side, draft.side))
    try:
        image.load()
    except DAMAGE:
        raise PictureError(_damage(data)) from None
    return _upright(_opaque(_eight_bits(image)), _orientation(image))


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow warns about many pixels, but `max_pixels` is stricter.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise PictureError(f"the image is too large: the limit is {max_pixels} pixels") from None
    except DAMAGE:
        raise PictureError(_damage(data)) from None


def _damage(data: bytes) -> str:
    if not _has_known_signature(data):
        return "the image cannot be decoded: it is neither JPEG, PNG nor WebP"
    if _is_cut(data):
        return "the image is truncated"
    return "the image is damaged and cannot be decoded"


def _has_known_signature(data: bytes) -> bool:
    return data.startswith((JPEG_START, PNG_START)) or _is_webp(data)


def _is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def _is_cut(data: bytes) -> bool:
    # The check is valid only for data that cannot be decoded.
    if _is_webp(data):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    end = PNG_END if data.startswith(PNG_START) else JPEG_END
    return end not in data[-64:]


def _eight_bits(image: Image.Image) -> Image.Image:
    # Pillow's conversion of 16-bit grey clips to white instead of scaling.
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.float32) / 257
    return Image.fromarray(np.clip(values + 0.5, 0, 255).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image if image.mode in ("L", "RGB") else image.convert(_plain_mode(image.mode))
    layered = image.convert("RGBA")
    backdrop = Image.new("RGBA", layered.size, _backdrop(layered))
    return Image.alpha_composite(backdrop, layered).convert("RGB")


def _plain_mode(mode: str) -> str:
    return "L" if mode in ("1", "LA", "La") else "RGB"


def _backdrop(layered: Image.Image) -> str:
    # A drawing in light ink would vanish on white.
    small = layered.resize((64, 64), Image.Resampling.BOX)
    alpha = np.asarray(small.getchannel("A"), dtype=np.float64) / 255
    grey = np.asarray(small.convert("RGB").convert("L"), dtype=np.float64)
    visible = alpha.mean()
    is_light = (grey * alpha).mean() > 160 * visible
    return "black" if 0 < visible < 0.5 and is_light else "white"


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ORIENTATION)
    except DAMAGE:  # broken metadata does not invalidate the image
        return None


def _upright(image: Image.Image, orientation: Any) -> Image.Image:
    transpose = UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)
