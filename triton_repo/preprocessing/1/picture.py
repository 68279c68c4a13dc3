"""Encoded images, as people upload them, to upright opaque pictures of eight bits per channel."""

from __future__ import annotations

import struct
import warnings
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

FloatArray = npt.NDArray[np.float32]

# Pillow opens more than forty formats; these three are what people send, and the best tested.
FORMATS = ("JPEG", "PNG", "WEBP")

# Above this Pillow, as it comes, refuses to open an image.
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

# What Pillow raises for damaged bytes, found by mutating valid files.
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, struct.error)


class PictureError(ValueError):
    """The bytes cannot be used as a picture; the text is one sentence for whoever sent them."""


class Draft(NamedTuple):
    """The least that a transform needs, so that a JPEG may be decoded at a fraction of its size."""

    mode: str
    side: int


def decode(data: bytes, max_pixels: int, draft: Draft | None = None) -> Image.Image:
    """The picture in mode L or RGB; raises PictureError.

    Its size is checked before any pixel is decoded: a PNG of some kilobytes can claim gigabytes.
    """
    if not data:
        raise PictureError("the image is empty")
    image = _opened(data, max_pixels)
    width, height = image.size
    if width * height > max_pixels:
        raise PictureError(
            f"the image is too large: it has {width} x {height} pixels, "
            f"and at most {max_pixels} pixels are taken"
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
            # Pillow's warning about many pixels; our limit is the stricter one.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise PictureError(
            f"the image is too large: at most {max_pixels} pixels are taken"
        ) from None
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
    """Whether the end is missing; to be asked only about bytes that cannot be decoded."""
    if _is_webp(data):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    end = PNG_END if data.startswith(PNG_START) else JPEG_END
    return end not in data[-64:]


def _eight_bits(image: Image.Image) -> Image.Image:
    """Sixteen bits of grey scaled to eight, where Pillow's own conversion clips them to white."""
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
    """White as paper is, or black below a drawing in light ink, which white would swallow."""
    small = layered.resize((64, 64), Image.Resampling.BOX)
    alpha = np.asarray(small.getchannel("A"), dtype=np.float64) / 255
    grey = np.asarray(small.convert("RGB").convert("L"), dtype=np.float64)
    visible = alpha.mean()
    is_light = (grey * alpha).mean() > 160 * visible
    return "black" if 0 < visible < 0.5 and is_light else "white"


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ORIENTATION)
    except DAMAGE:  # a picture with broken metadata is still a picture
        return None


def _upright(image: Image.Image, orientation: Any) -> Image.Image:
    turn = UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)
