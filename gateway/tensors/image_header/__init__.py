"""What an encoded image declares, read without decoding it.

Libraries walk through a file's metadata in Python and decode whatever it declares. `read_image_header` looks
at the same bytes first: its cost is linear, what it finds is bounded, and the metadata goes no further.
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
    """The header of a JPEG, PNG or WebP. `name` is the input's, for the sentence of an error.

    Raises `BadImage` for what is none, and `TooLarge` for more scans, segments or padding than is taken.
    """
    if not data:
        raise BadImage(f"the image for {quote_text(input_name)} is empty")
    reader = find_header_reader(data)
    if reader is None:
        raise BadImage(
            f"what came for {quote_text(input_name)} is not an image in JPEG, PNG or WebP"
        )
    try:
        header = reader(data)
        if not header.pixels:
            raise DamagedImage("it declares no size")
    except DamagedImage as exc:
        raise BadImage(
            f"the image for {quote_text(input_name)} is truncated or damaged: {exc}"
        ) from None
    except ExcessiveImage as exc:
        raise TooLarge(f"the image for {quote_text(input_name)} has {exc}") from None
    except (IndexError, ValueError, struct.error):
        raise BadImage(
            f"the image for {quote_text(input_name)} is truncated or damaged: it ends within its header"
        ) from None
    return header


def find_header_reader(data: bytes) -> HeaderReader | None:
    """The reader of the format that the first bytes name; None if they name none."""
    found = next(
        (reader for start, reader in HEADER_READERS.items() if data.startswith(start)), None
    )
    if found is webp.read_webp and data[8:12] != webp.WEBP_FORM_TYPE:
        return None
    return found


def strip_metadata(data: bytes, header: ImageHeader) -> bytes:
    """The same image without metadata; `data` itself if it has none."""
    kept = sum(end - start for start, end in header.spans) + len(header.prefix)
    if kept == len(data):
        return data
    whole = memoryview(data)
    return b"".join([header.prefix, *(whole[start:end] for start, end in header.spans)])
