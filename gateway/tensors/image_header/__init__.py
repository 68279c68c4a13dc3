"""Readers for the headers of encoded images, which do not decode the image.

Image libraries parse a file's metadata in Python and decode whatever it declares. `read_image_header` checks
the same bytes first, at linear cost and with bounded results, and `strip_metadata` removes the metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from gateway.errors import BadImage, TooLarge
from gateway.messages import quote_text
from gateway.tensors.image_header import jpeg, png, webp
from gateway.tensors.image_header.header import DamagedImage, ExcessiveImage, ImageHeader

__all__ = ["ImageHeader", "find_header_reader", "read_image_header", "strip_metadata"]

HeaderReader = Callable[[bytes], ImageHeader]
HEADER_READERS: Final[dict[bytes, HeaderReader]] = {
    jpeg.JPEG_SIGNATURE: jpeg.read_jpeg,
    png.PNG_SIGNATURE: png.read_png,
    webp.RIFF_SIGNATURE: webp.read_webp,
}


def read_image_header(data: bytes, input_name: str) -> ImageHeader:
    """Return the header of a JPEG, PNG or WebP image. Raises `BadImage`, or `TooLarge` for too many parts."""
    if not data:
        raise BadImage(f"the image for input {quote_text(input_name)} is empty")
    reader = find_header_reader(data)
    if reader is None:
        raise BadImage(
            f"the value for input {quote_text(input_name)} is not a JPEG, PNG or WebP image"
        )
    try:
        header = reader(data)
        if not header.pixels:
            raise DamagedImage("its width or height is zero")
    except DamagedImage as exc:
        raise build_damage_error(input_name, str(exc)) from None
    except ExcessiveImage as exc:
        raise TooLarge(f"the image for input {quote_text(input_name)} has {exc}") from None
    except (IndexError, ValueError, struct.error):
        raise build_damage_error(input_name, "it ends within its header") from None
    return header


def build_damage_error(input_name: str, reason: str) -> BadImage:
    return BadImage(
        f"the image for input {quote_text(input_name)} is truncated or damaged: {reason}"
    )


def find_header_reader(data: bytes) -> HeaderReader | None:
    reader = next((read for start, read in HEADER_READERS.items() if data.startswith(start)), None)
    if reader is webp.read_webp and data[8:12] != webp.WEBP_FORM_TYPE:
        return None
    return reader


def strip_metadata(data: bytes, header: ImageHeader) -> bytes:
    size_bytes = sum(end - start for start, end in header.spans) + len(header.prefix)
    if size_bytes == len(data):
        return data
    view = memoryview(data)
    return b"".join([header.prefix, *(view[start:end] for start, end in header.spans)])
