"""Decoding of images (JPEG, PNG, WebP) to arrays, by Pillow and within limits. Pure."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, cast

import numpy as np
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
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
# Pillow keeps 16 bits of grey images only. Of coloured ones it unpacks the upper or the lower byte.
SIXTEEN_BIT_MODES: Final = ("I;16", "I;16B", "I;16L", "I;16N", "I")
LOWER_BYTES: Final = {"RGB;16B": "RGB;16L", "RGBA;16B": "RGBA;16L"}
MAX_16_BIT: Final = (1 << 16) - 1
COST_OF_16_BITS: Final = 4  # beside 8 bits: more passes, and more memory
PNG_BIT_DEPTH_POSITION: Final = 24
LUMA_WEIGHTS: Final = (0.299, 0.587, 0.114)  # as in Pillow's conversion to grey
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


class TooManyParts(Exception):
    """A file consists of more parts than real ones of its size."""


class LimitedFile(io.BytesIO):
    """A file that is read so often only, because Pillow parses it in Python, part by part."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._remaining_reads = MAX_READS + len(data) // MIN_READ_BYTES

    def read(self, size: int | None = -1) -> bytes:
        self._remaining_reads -= 1
        if self._remaining_reads < 0:
            raise TooManyParts
        return super().read(size)


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
        """Return the pixels in the layout and size of the input, upright.

        They are UINT8, or UINT16 if the image has 16 bits and the input keeps them.
        The shape is [height, width], [channels, height, width] or [height, width, channels].
        Raises `BadImage`, `TooLarge` or `CostlyImages`.
        """
        with self._open(data) as image:
            self._add_cost(image, data)
            if self.spec.keeps_depth and has_16_bits(image, data):
                pixels = resize_channels(self._read_16_bits(image, data), self.spec)
            else:
                upright = load_upright_image(image, self.spec)
                pixels = resize_image(convert_image_mode(upright, self.spec.mode), self.spec)
            return arrange_pixels(pixels, self.spec)

    def _read_16_bits(self, image: Image.Image, data: bytes) -> np.ndarray:
        """Return all bits in the channels of the input; the shape is [height, width, channels]."""
        if image.mode in SIXTEEN_BIT_MODES:
            grey = read_grey_16_bits(load_upright_image(image, self.spec))
            return convert_channels(grey[..., np.newaxis], self.spec.mode)
        tile = cast(ImageFile, image).tile[0]
        lower_mode = LOWER_BYTES.get(str(tile.args))
        if lower_mode is None:
            raise BadImage(
                f"the image for input {self._input} has 16 bits of grey with transparency, which cannot "
                "be decoded without loss; save it without transparency, or with 8 bits"
            )
        channels = np.asarray(load_upright_image(image, self.spec)).astype(np.uint16)
        channels <<= 8
        with self._open(data) as again:
            cast(ImageFile, again).tile = [tile._replace(args=lower_mode)]
            channels |= np.asarray(load_upright_image(again, self.spec))
        return convert_channels(channels, self.spec.mode)

    def _count_pixels(self, data: bytes) -> int:
        with self._open(data) as image:
            return image.width * image.height

    @contextmanager
    def _open(self, data: bytes) -> Iterator[Image.Image]:
        """Open an image within the limits, and translate Pillow's errors."""
        if not data:
            raise BadImage(f"the image for input {self._input} is empty")
        if not is_image(data):
            raise BadImage(
                f"the value for input {self._input} is not a JPEG, PNG or WebP image"
                f"{describe_other_file(data)}"
            )
        try:
            with Image.open(LimitedFile(data), formats=FORMATS) as image:
                if excess := find_excess(image, data, self._limits):
                    raise TooLarge(f"the image for input {self._input} has {excess}")
                yield image
        except TooManyParts:
            raise TooLarge(
                f"the image for input {self._input} has too many parts for its size; save it again"
            ) from None
        except PILLOW_ERRORS:
            raise BadImage(f"the image for input {self._input} is truncated or damaged") from None

    def _add_cost(self, image: Image.Image, data: bytes) -> None:
        """Raise `CostlyImages` if the images may take too long. Scans of a JPEG count as well."""
        pixels = image.width * image.height
        if self.spec.keeps_depth and has_16_bits(image, data):
            pixels *= COST_OF_16_BITS
        self._cost_pixels += pixels + pixels * (count_scans(image, data) - 1) // SCANS_PER_PASS
        if self._cost_pixels > self._limits.max_cost_pixels:
            raise CostlyImages


def find_excess(image: Image.Image, data: bytes, limits: PayloadLimits) -> str:
    """Return what an image has too much of to be decoded; empty if nothing."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        return f"{width} × {height} pixels; the limit is {limits.max_image_pixels} pixels"
    if max(width, height) > limits.max_image_side:
        return f"{width} × {height} pixels; the limit is {limits.max_image_side} pixels per side"
    if count_scans(image, data) > MAX_SCANS:
        return f"more than {MAX_SCANS} scans; save it as a baseline JPEG"
    if image.format == "JPEG" and len(data) > MIN_PADDED_BYTES and LONG_PADDING in data:
        return f"{len(LONG_PADDING)} bytes of padding; save it again"
    return ""


def count_scans(image: Image.Image, data: bytes) -> int:
    return data.count(START_OF_SCAN) if image.format == "JPEG" else 1


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
        grey = read_grey_16_bits(image)
        image = Image.fromarray((grey // 257 + (grey % 257 > 128)).astype(np.uint8))
    if mode != "RGBA" and image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image if image.mode == mode else image.convert(mode)


def read_grey_16_bits(image: Image.Image) -> np.ndarray:
    return np.asarray(image).clip(0, MAX_16_BIT).astype(np.uint16)


def resize_image(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    size = find_size(image.width, image.height, spec)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image)


def find_size(width: int, height: int, spec: ImageSpec) -> tuple[int, int]:
    """Return width and height of the input, whose sizes may be those of the image."""
    return (width if spec.width < 0 else spec.width, height if spec.height < 0 else spec.height)


def has_16_bits(image: Image.Image, data: bytes) -> bool:
    return image.format == "PNG" and data[PNG_BIT_DEPTH_POSITION] == 16


def convert_channels(channels: np.ndarray, mode: str) -> np.ndarray:
    """Convert UINT16 grey, RGB or RGBA [height, width, channels] to a mode, as Pillow does with 8 bits."""
    if channels.shape[2] == 4 and mode != "RGBA":  # over white
        alpha = channels[..., 3:].astype(np.float32) / MAX_16_BIT
        channels = np.rint(channels[..., :3] * alpha + (1 - alpha) * MAX_16_BIT)
    if channels.shape[2] == 3 and mode == "L":
        channels = np.rint(channels @ np.array(LUMA_WEIGHTS, np.float32))[..., np.newaxis]
    if channels.shape[2] == 1 and mode != "L":
        channels = channels.repeat(3, axis=2)
    if channels.shape[2] < len(mode):
        channels = np.pad(channels, ((0, 0), (0, 0), (0, 1)), constant_values=MAX_16_BIT)
    return channels.astype(np.uint16)


def resize_channels(channels: np.ndarray, spec: ImageSpec) -> np.ndarray:
    height, width, count = channels.shape
    size = find_size(width, height, spec)
    if size == (width, height):
        return channels
    resized = np.empty((size[1], size[0], count), np.uint16)
    for channel in range(count):
        plane = Image.fromarray(channels[..., channel].astype(np.float32))
        resized[..., channel] = np.rint(np.asarray(plane.resize(size, Image.Resampling.BILINEAR)))
    return resized


def arrange_pixels(pixels: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """Return the pixels in the layout of the input."""
    height, width = pixels.shape[:2]
    if spec.layout is ChannelLayout.GREY:
        return pixels.reshape(height, width)
    pixels = pixels.reshape(height, width, -1)
    return pixels.transpose(2, 0, 1) if spec.layout is ChannelLayout.CHANNELS_FIRST else pixels


# To name what was sent: the first bytes, at a position, of files that are no images to decode.
OTHER_FILES: Final[tuple[tuple[int, bytes, str], ...]] = (
    (4, b"ftyphe", "a HEIC file, as iPhones take"),
    (4, b"ftypmif1", "a HEIF file"),
    (4, b"ftypmsf1", "a HEIF file"),
    (4, b"ftypavi", "an AVIF file"),
    (4, b"ftyp", "a video"),
    (0, b"GIF8", "a GIF file"),
    (0, b"BM", "a BMP file"),
    (0, b"II*\0", "a TIFF file"),
    (0, b"MM\0*", "a TIFF file"),
    (4, b"jP  ", "a JPEG 2000 file"),
    (4, b"JXL ", "a JPEG XL file"),
    (0, b"\xff\x0a", "a JPEG XL file"),
    (0, b"%PDF", "a PDF file"),
    (0, b"<", "an XML or HTML text, such as SVG"),
)


def describe_other_file(data: bytes) -> str:
    names = (name for start, magic, name in OTHER_FILES if data.startswith(magic, start))
    name = next(names, "")
    return name and f", but {name}; convert it"
