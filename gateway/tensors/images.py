"""Decoding of images (JPEG, PNG, WebP) to arrays, by Pillow and within limits. Pure."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

from gateway.errors import BadImage, TooLarge
from gateway.messages import quote_text
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec

FORMATS: Final = ("JPEG", "PNG", "WEBP")
JPEG_SIGNATURE: Final = b"\xff\xd8\xff"
PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
RIFF_SIGNATURE: Final = b"RIFF"
WEBP_FORM_TYPE: Final = b"WEBP"
# Each scan of a progressive JPEG costs a pass over the image, even if it has few bytes. Encoders write about
# ten. About four scans take as long as the conversion to pixels.
START_OF_SCAN: Final = b"\xff\xda"
MAX_SCANS: Final = 64
# Pillow's cost of fill bytes in the data of a JPEG is quadratic, small below 2 MiB. No segment is as long.
MIN_PADDED_BYTES: Final = 2 << 20
LONG_PADDING: Final = b"\xff" * (1 << 16)
SCANS_PER_PASS: Final = 4
# A real file has a few dozen segments, and its data in chunks of 8 KiB or more. Each takes three reads.
MAX_READS: Final = 4096
MIN_READ_BYTES: Final = 1024
# Opening an image takes time even if the image is small.
MAX_IMAGES: Final = 4096
SIXTEEN_BIT_MODES: Final = ("I;16", "I;16B", "I;16L", "I;16N", "I")
MAX_16_BIT: Final = (1 << 16) - 1
# From this EXIF orientation on, width and height are swapped.
FIRST_SIDEWAYS_ORIENTATION: Final = 5
ORIENTATION_TRANSPOSES: Final[Mapping[object, Image.Transpose]] = {
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

# Pillow's own limit is disabled, because it only warns; `ImageReader` checks ours before decoding.
Image.MAX_IMAGE_PIXELS = None
# Pillow warns of damaged metadata, which does not matter.
warnings.filterwarnings("ignore", module=r"PIL\.")


class CostlyImages(Exception):
    """The images need more time than a thread may take, because it cannot be stopped."""


class ImageFile(io.BytesIO):
    """A file that is read so often only, because Pillow parses it in Python, part by part."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._remaining_reads = MAX_READS + len(data) // MIN_READ_BYTES

    def read(self, size: int | None = -1) -> bytes:
        self._remaining_reads -= 1
        if self._remaining_reads < 0:
            raise TooManyParts
        return super().read(size)


class TooManyParts(Exception):
    """A file consists of more parts than real ones of its size."""


class ImageReader:
    """Decodes the images of one input, and adds up their cost."""

    def __init__(self, spec: ImageSpec, limits: PayloadLimits, input_name: str) -> None:
        self.spec = spec
        self._limits = limits
        self._input = quote_text(input_name)
        self._cost_pixels = 0

    def check_all(self, files: Sequence[bytes]) -> None:
        """Check how much memory the images need together, before the first is decoded.

        Raises `TooLarge` or `BadImage`.
        """
        count = len(files)
        if count > MAX_IMAGES:
            raise TooLarge(
                f"input {self._input} accepts at most {MAX_IMAGES} images per request; got {count}"
            )
        if count == 1:
            return
        if min(self.spec.height, self.spec.width) > 0:
            pixels = count * self.spec.height * self.spec.width
        else:
            pixels = sum(map(self._count_pixels, files))
        limit = self._limits.max_image_pixels
        if pixels > limit:
            raise TooLarge(
                f"the {count} images for input {self._input} decode to {pixels} pixels; the limit is "
                f"{limit} pixels; send fewer images per request"
            )

    def read(self, data: bytes) -> np.ndarray:
        """Return UINT8 values 0..255 in the layout and size of the input, upright.

        The shape is [height, width], [channels, height, width] or [height, width, channels].
        Raises `BadImage`, `TooLarge` or `CostlyImages`.
        """
        with self._open(data) as image:
            self._add_cost(image, data)
            upright = load_upright_image(image, self.spec)
            return arrange_pixels(convert_image_mode(upright, self.spec.mode), self.spec)

    def _count_pixels(self, data: bytes) -> int:
        with self._open(data) as image:
            return image.width * image.height

    @contextmanager
    def _open(self, data: bytes) -> Iterator[Image.Image]:
        """Open an image within the limits, and translate Pillow's errors."""
        if not data:
            raise BadImage(f"the image for input {self._input} is empty")
        if not is_image(data):
            raise BadImage(f"the value for input {self._input} is not a JPEG, PNG or WebP image")
        try:
            with Image.open(ImageFile(data), formats=FORMATS) as image:
                if problem := self._find_excess(image.width, image.height):
                    raise TooLarge(f"the image for input {self._input} has {problem}")
                yield image
        except TooManyParts:
            raise TooLarge(
                f"the image for input {self._input} has too many parts for its size; save it again"
            ) from None
        except PILLOW_ERRORS:
            raise BadImage(f"the image for input {self._input} is truncated or damaged") from None

    def _find_excess(self, width: int, height: int) -> str:
        limits = self._limits
        if width * height > limits.max_image_pixels:
            return f"{width} × {height} pixels; the limit is {limits.max_image_pixels} pixels"
        if max(width, height) > limits.max_image_side:
            return (
                f"{width} × {height} pixels; the limit is {limits.max_image_side} pixels per side"
            )
        return ""

    def _add_cost(self, image: Image.Image, data: bytes) -> None:
        """Check how long decoding may take. Raises `TooLarge` or `CostlyImages`."""
        is_jpeg = isinstance(image, JpegImageFile)
        scans = data.count(START_OF_SCAN) if is_jpeg else 1
        problem = ""
        if scans > MAX_SCANS:
            problem = f"more than {MAX_SCANS} scans; save it as a baseline JPEG"
        elif is_jpeg and len(data) > MIN_PADDED_BYTES and LONG_PADDING in data:
            problem = f"{len(LONG_PADDING)} bytes of padding; save it again"
        if problem:
            raise TooLarge(f"the image for input {self._input} has {problem}")
        pixels = image.width * image.height
        self._cost_pixels += pixels + pixels * (scans - 1) // SCANS_PER_PASS
        if self._cost_pixels > self._limits.max_cost_pixels:
            raise CostlyImages


def is_image(data: bytes) -> bool:
    return data.startswith((JPEG_SIGNATURE, PNG_SIGNATURE)) or (
        data.startswith(RIFF_SIGNATURE) and data[8:12] == WEBP_FORM_TYPE
    )


def load_upright_image(image: Image.Image, spec: ImageSpec) -> Image.Image:
    if not isinstance(image, JpegImageFile):
        image.load()  # the metadata of a PNG may follow its data, whose damage must not be ignored
    orientation = read_orientation(image)
    transpose = ORIENTATION_TRANSPOSES.get(orientation)
    is_sideways = transpose is not None and orientation >= FIRST_SIDEWAYS_ORIENTATION
    size = (spec.height, spec.width) if is_sideways else (spec.width, spec.height)
    if isinstance(image, JpegImageFile) and min(size) > 0 and image.mode in ("L", "RGB"):
        image.draft(image.mode, size)  # decodes a JPEG at a reduced scale for a small size
    image.load()
    return image if transpose is None else image.transpose(transpose)


def read_orientation(image: Image.Image) -> int:
    """Return the orientation in the EXIF metadata or else in XMP; 1 if it is damaged or missing."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except PILLOW_ERRORS:
        return 1
    return orientation if isinstance(orientation, int) else 1


def convert_image_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to L, RGB or RGBA. 16 bits are scaled to 8; L and RGB are composited over white."""
    if image.mode in SIXTEEN_BIT_MODES:
        # In integers, because floats of 25 million pixels would take 600 MB.
        grey = np.asarray(image).clip(0, MAX_16_BIT).astype(np.uint16)
        image = Image.fromarray((grey // 257 + (grey % 257 > 128)).astype(np.uint8))
    if mode != "RGBA" and image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image if image.mode == mode else image.convert(mode)


def arrange_pixels(converted: Image.Image, spec: ImageSpec) -> np.ndarray:
    """Return the pixels in the size and layout of the input."""
    width = converted.width if spec.width < 0 else spec.width
    height = converted.height if spec.height < 0 else spec.height
    if (width, height) != converted.size:
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    if spec.layout is ChannelLayout.GREY:
        return array
    array = array.reshape(height, width, -1)
    return array.transpose(2, 0, 1) if spec.layout is ChannelLayout.CHANNELS_FIRST else array
