"""A reader for the orientation in EXIF metadata, which is a TIFF file without an image (Exif 3.0, 4.5.2)."""

from __future__ import annotations

import struct
from typing import Final

EXIF_PREFIX: Final = b"Exif\0\0"
BYTE_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">"}
ORIENTATION_TAG: Final = 0x0112
# The first directory of a real file has about twenty entries.
MAX_EXIF_ENTRIES: Final = 512
# The struct formats of the integer datatypes; the value starts at the first of the entry's four bytes.
INTEGER_FORMATS: Final = {1: "B", 3: "H", 4: "L"}
UPRIGHT_ORIENTATION: Final = 1


def read_orientation(block: bytes) -> int:
    """Return the orientation, 1 to 8; 1 if the block is damaged or has no valid orientation."""
    try:
        return find_orientation(block.removeprefix(EXIF_PREFIX))
    except struct.error:
        return UPRIGHT_ORIENTATION


def find_orientation(tiff: bytes) -> int:
    order = BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return UPRIGHT_ORIENTATION
    (directory,) = struct.unpack_from(f"{order}L", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, directory)
    entry = struct.Struct(f"{order}HHL4s")
    for number in range(min(count, MAX_EXIF_ENTRIES)):
        tag, datatype, values, value = entry.unpack_from(tiff, directory + 2 + entry.size * number)
        if tag == ORIENTATION_TAG:
            if datatype not in INTEGER_FORMATS or values != 1:
                return UPRIGHT_ORIENTATION
            (orientation,) = struct.unpack_from(order + INTEGER_FORMATS[datatype], value)
            return orientation if 1 <= orientation <= 8 else UPRIGHT_ORIENTATION
    return UPRIGHT_ORIENTATION
