"""Images are decoded as Pillow decodes them, upright and within limits, or refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from gateway.errors import BadImage, TooLarge
from gateway.tensors.images import CostlyImages, ImageReader
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec
from tests.support.hostile_files import (
    after_size,
    after_start,
    chunk,
    exif,
    jpeg,
    jpeg_of_scans,
    noise,
    padded_data,
    padded_jpeg,
    png,
    png_of_chunks,
    png_without_palette,
    segment,
    with_exif,
)
from tests.support.images import encoded

PICTURE = Image.fromarray(noise(53, 37))
SPEC = ImageSpec(ChannelLayout.CHANNELS_LAST, "RGB", -1, -1)


def read_pixels(
    data: bytes, spec: ImageSpec = SPEC, limits: PayloadLimits | None = None
) -> np.ndarray:
    return ImageReader(spec, limits or PayloadLimits(), "X").read(data)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(30, 40), (200, 170), (224, 224)])
def test_jpeg_decoded_at_a_reduced_scale_is_almost_the_resized_whole(
    mode: str, size: tuple[int, int]
) -> None:
    areas = Image.fromarray(noise(12, 9)).resize((1100, 900), Image.Resampling.BICUBIC)
    data = encoded(areas.convert(mode), "JPEG")
    pixels = read_pixels(data, ImageSpec(ChannelLayout.CHANNELS_LAST, mode, *size))
    whole = Image.open(io.BytesIO(data)).resize(size[::-1], Image.Resampling.BILINEAR)
    difference = np.abs(pixels - np.asarray(whole, np.float64).reshape(pixels.shape))
    assert difference.mean() < 3
    assert difference.max() < 64


PNG_METADATA = (
    chunk(b"eXIf", exif((0x0112, 3, 1, b"\t\0\0\0"))),  # an orientation that does not exist
    chunk(b"zTXt", b"a\0\0" + bytes(100)),
    chunk(b"tEXt", b"a\0" + bytes(1000)) * 1000,
    chunk(b"iCCP", bytes(1 << 20)),
    chunk(b"acTL", b"\0" * 8) * 2,
)
JPEG_METADATA = (
    segment(0xE2, b"MPF\0II*\0\x08\0\0\0\1\0\1\xb0\4\0\1\0\0\0\xff\xff\xff\xff"),
    segment(0xE2, b"ICC_PROFILE\0\1\2" + bytes(1000)) * 50,
    segment(0xED, b"Photoshop 3.0\x008BIM" * 1000),
    segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x"),
    segment(0xFE, bytes(60_000)),
)
# As an orientation: a text, a rational at a wild offset, cut, a wild directory, no TIFF.
EXIF_BLOCKS = (
    exif((0x0112, 2, 4, b"6\0\0\0")),
    exif((0x0112, 5, 1, b"\xff\xff\xff\xff")),
    exif((0x0112, 3, 1, b"\6\0\0\0"))[:15],
    b"II*\0\xff\xff\xff\xff",
    b"nothing of the kind",
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_deviations_and_hostile_metadata_change_no_pixel() -> None:
    pngs = [png()[:-12], *(after_size(png(), metadata) for metadata in PNG_METADATA)]
    # The standard allows padding between segments.
    jpegs = [padded_jpeg(15), *(after_start(jpeg(), metadata) for metadata in JPEG_METADATA)]
    jpegs += [with_exif(jpeg(), block) for block in EXIF_BLOCKS]
    webp = encoded(PICTURE, "WEBP")
    for sound, files in ((png(), pngs), (jpeg(), jpegs), (webp, [webp])):
        for data in files:
            assert np.array_equal(read_pixels(data), read_pixels(sound)), data[:60]
        assert np.array_equal(read_pixels(sound + bytes(5000)), read_pixels(sound))


FRAME = segment(0xC0, b"\x08\0\x10\0\x10\1\1\x11\0")
DAMAGED = {
    "a RIFF file": b"RIFF\4\0\0\0WAVE",
    "a JPEG of a signature": b"\xff\xd8\xff",
    "a JPEG without a frame": b"\xff\xd8" + segment(0xDA, bytes(6)) + b"\xff\xd9",
    "a JPEG of two frames": after_start(jpeg(), FRAME),
    "a JPEG of a frame in its data": jpeg()[:-2] + FRAME + b"\xff\xd9",
    "a JPEG of no size": b"\xff\xd8" + FRAME.replace(b"\0\x10", b"\0\0") + segment(0xDA, bytes(6)),
    "a JPEG with a long segment": b"\xff\xd8\xff\xe0\xff\xff" + bytes(9),
    "a JPEG with an unknown segment": after_start(jpeg(), segment(0xF7)),
    "a PNG cut in its size": png()[:20],
    "a PNG cut in its data": png()[:-40],
    "a PNG damaged in its data": png()[:60] + bytes([png()[60] ^ 1]) + png()[61:],
    "a PNG without data": png()[:33] + chunk(b"IEND"),
    "a PNG without a palette": png_without_palette(),
    "a PNG of three bits": png()[:24] + b"\3" + png()[25:],
    "a PNG with a chunk of no type": after_size(png(), chunk(b"a\0\0\0")),
    "a WebP cut in its data": encoded(PICTURE, "WEBP")[:-40],
    "a WebP that begins with metadata": b"RIFF\x0c\0\0\0WEBPEXIF\0\0\0\0",
    "a WebP without a frame": b"RIFF\x16\0\0\0WEBPVP8 \x0a\0\0\0" + bytes(10),
}
EXCESSIVE = {
    "padding": (padded_jpeg(1 << 20), "too many parts"),
    "padding in the data": (padded_data(3 << 20), "bytes of padding"),
    "scans": (jpeg_of_scans(65), "64 scans"),
    "JPEG segments": (after_start(jpeg(), segment(0xFE) * 5000), "too many parts"),
    "PNG chunks": (png_of_chunks(100_000), "too many parts"),
}


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_image_is_refused(subtests: pytest.Subtests) -> None:
    for name, data in DAMAGED.items():
        with (
            subtests.test(name),
            pytest.raises(BadImage, match=r"for input 'X' is (not a JPEG|truncated or damaged)"),
        ):
            read_pixels(data)
    for name, (data, words) in EXCESSIVE.items():
        with (
            subtests.test(name),
            pytest.raises(TooLarge, match=f"the image for input 'X' has .*{words}"),
        ):
            read_pixels(data)


def test_pixels_and_cost_are_limited_before_decoding() -> None:
    limits = PayloadLimits(max_image_pixels=100, max_image_side=50)
    for data in (jpeg(11, 11), png(11, 11), encoded(Image.new("RGB", (11, 11)), "WEBP")):
        with pytest.raises(TooLarge, match="11 × 11 pixels; the limit is 100"):
            read_pixels(data, limits=limits)
    with pytest.raises(TooLarge, match="the limit is 50 pixels per side"):
        read_pixels(png(51, 1), limits=limits)
    limits = PayloadLimits(max_cost_pixels=2 * 256)
    reader = ImageReader(SPEC, limits, "X")
    assert [reader.read(png()).shape for _ in range(2)] == [(16, 16, 3)] * 2
    # The scans of a JPEG count as well.
    for costly, data in ((reader, png()), (ImageReader(SPEC, limits, "X"), jpeg_of_scans(64))):
        with pytest.raises(CostlyImages):
            costly.read(data)
