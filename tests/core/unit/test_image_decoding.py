"""Images are decoded as Pillow decodes them, upright and within limits, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from gateway.errors import BadImage, GatewayError, TooLarge
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
    padded_data,
    padded_jpeg,
    png,
    png_of_chunks,
    png_without_palette,
    segment,
    with_exif,
)
from tests.support.images import encoded

RANDOM = np.random.default_rng(1)
PICTURE = Image.fromarray(RANDOM.integers(0, 256, (37, 53, 3), np.uint8))
DEEP = Image.fromarray(RANDOM.integers(0, 65536, (30, 40)).astype(np.uint16))
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112], SIDEWAYS[0x010F] = 6, "maker"
SIDEWAYS[0x8769] = {0x9003: "2020:01:01 00:00:00"}
METADATA: list[dict[str, Any]] = [
    {},
    {"exif": SIDEWAYS},
    {"exif": SIDEWAYS, "icc_profile": bytes(200_000)},
]
TURNED = [PICTURE.rotate(90, expand=False), PICTURE.rotate(180)]
FILES = {
    f"{kind} {number}": file
    for kind, files in {
        "JPEG": [
            encoded(PICTURE.convert(mode), "JPEG", **options)
            for mode in ("RGB", "L", "CMYK")
            for options in (
                *METADATA,
                {"progressive": True},
                {"quality": 95, "subsampling": 0, "comment": b"hello"},
                {"restart_marker_rows": 1},
                {"optimize": True},
            )
        ],
        "PNG": [
            *(
                encoded(PICTURE.convert(mode), **options)
                for mode in ("RGB", "L", "P", "1", "LA", "RGBA")
                for options in METADATA
            ),
            encoded(DEEP),
            encoded(PICTURE.convert("P"), transparency=3),
            encoded(PICTURE, save_all=True, append_images=TURNED),
        ],
        "WEBP": [
            encoded(PICTURE.convert(mode), "WEBP", **options)
            for mode in ("RGB", "RGBA")
            for options in (
                *METADATA,
                {"lossless": True},
                {"lossless": True, "exif": SIDEWAYS, "xmp": b"<x/>"},
                {"save_all": True, "append_images": TURNED, "exif": SIDEWAYS},
            )
        ],
    }.items()
    for number, file in enumerate(files)
}
SPEC = ImageSpec(ChannelLayout.CHANNELS_LAST, "RGB", -1, -1)


def read_pixels(
    data: bytes, spec: ImageSpec = SPEC, limits: PayloadLimits | None = None
) -> np.ndarray:
    return ImageReader(spec, limits or PayloadLimits(), "X").read(data)


# Sound files.


@pytest.mark.parametrize("name", FILES)
def test_real_file_is_read_like_pillow(name: str) -> None:
    image = Image.open(io.BytesIO(FILES[name]))
    upright = ImageOps.exif_transpose(image)
    if image.mode == "I;16":
        upright = Image.fromarray(np.rint(np.asarray(upright) / 257).astype(np.uint8))
    rgba = upright.convert("RGBA")
    if upright.has_transparency_data:
        rgba = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    expected = rgba.convert("RGB") if upright.has_transparency_data else upright.convert("RGB")
    assert np.array_equal(read_pixels(FILES[name]), np.asarray(expected))


def test_image_is_turned_by_its_exif_or_xmp_orientation() -> None:
    expected = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    for orientation, transpose in expected.items():
        turn = Image.Exif()
        turn[0x0112] = orientation
        data = encoded(PICTURE, exif=turn)
        upright: Image.Image = Image.open(io.BytesIO(data))
        if transpose is not None:
            upright = upright.transpose(transpose)
        xmp = f'<x:xmpmeta tiff:Orientation="{orientation}"/>'.encode()
        for sent in (data, encoded(PICTURE, "WEBP", lossless=True, xmp=xmp)):
            assert np.array_equal(read_pixels(sent), np.asarray(upright)), orientation


# Decoding at a reduced scale.


def draw_jpeg(seed: int, mode: str) -> bytes:
    """Return a JPEG of blurred areas with noise, of any size and encoding."""
    random = np.random.default_rng(seed)
    width, height, columns, rows = map(int, random.integers((60, 60, 2, 2), (1400, 1400, 24, 24)))
    areas = Image.fromarray(random.integers(0, 256, (rows, columns, 3), np.uint8))
    picture = np.asarray(areas.resize((width, height), Image.Resampling.BICUBIC), np.float64)
    noise = random.normal(0, random.uniform(0, 12), picture.shape)
    image = Image.fromarray((picture + noise).clip(0, 255).astype(np.uint8)).convert(mode)
    options = {"quality": 50 + seed % 46, "subsampling": seed % 3, "progressive": seed % 2 == 1}
    return encoded(image, "JPEG", **options)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_jpeg_decoded_at_a_reduced_scale_is_almost_the_resized_whole(seeds: range) -> None:
    differences = []
    for seed in seeds:
        mode = ("RGB", "L")[seed // 2 % 2]
        data = draw_jpeg(seed, mode)
        width, height = 28 + 37 * seed % 270, 28 + 53 * seed % 270
        pixels = read_pixels(data, ImageSpec(ChannelLayout.CHANNELS_LAST, mode, height, width))
        whole = Image.open(io.BytesIO(data)).resize((width, height), Image.Resampling.BILINEAR)
        expected = np.asarray(whole, np.float64).reshape(pixels.shape)
        difference = np.abs(pixels - expected)
        assert difference.mean() < 10, seed
        assert difference.max() < 64, seed
        differences.append(difference.mean())
    assert np.mean(differences) < 3


# EXIF.

EXIF_BLOCKS = {
    "SHORT": (exif((0x0112, 3, 1, b"\6\0\0\0")), 6),
    "LONG": (exif((0x0112, 4, 1, b"\6\0\0\0")), 6),
    "BYTE": (exif((0x0112, 1, 1, b"\6\0\0\0")), 1),
    "big-endian": (exif((0x0112, 3, 1, b"\0\6\0\0"), order=">"), 6),
    "the second entry": (exif((0x010F, 2, 1, b"a\0\0\0"), (0x0112, 3, 1, b"\3\0\0\0")), 3),
    "a text": (exif((0x0112, 2, 4, b"6\0\0\0")), 1),
    "a rational at a wild offset": (exif((0x0112, 5, 1, b"\xff\xff\xff\xff")), 1),
    "several values": (exif((0x0112, 3, 2, b"\6\0\6\0")), 6),
    "out of range": (exif((0x0112, 3, 1, b"\t\0\0\0")), 1),
    "zero": (exif((0x0112, 3, 1, b"\0\0\0\0")), 1),
    "huge": (exif((0x0112, 4, 1, b"\xff\xff\xff\xff")), 1),
    "an unknown datatype": (exif((0x0112, 99, 1, b"\6\0\0\0")), 1),
    "none": (exif((0x010F, 2, 1, b"a\0\0\0")), 1),
    "cut": (exif((0x0112, 3, 1, b"\6\0\0\0"))[:15], 1),
    "a wild directory": (b"II*\0\xff\xff\xff\xff", 1),
    "no TIFF": (b"nothing of the kind", 1),
    "empty": (b"", 1),
}


def test_orientation_is_a_number_from_1_to_8_or_else_1(subtests: pytest.Subtests) -> None:
    for name, (block, orientation) in EXIF_BLOCKS.items():
        with subtests.test(name):
            shape = (16, 8, 3) if orientation >= 5 else (8, 16, 3)
            assert read_pixels(with_exif(jpeg(16, 8), block)).shape == shape
            assert read_pixels(after_size(png(16, 8), chunk(b"eXIf", block))).shape == shape


PNG_METADATA = (
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


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_deviations_and_hostile_metadata_change_no_pixel() -> None:
    for data in (jpeg(), png(), encoded(PICTURE, "WEBP")):
        assert np.array_equal(read_pixels(data + bytes(5000)), read_pixels(data))
    pngs = [png()[:-12], *(after_size(png(), metadata) for metadata in PNG_METADATA)]
    # The standard allows padding between segments.
    jpegs = [padded_jpeg(15), *(after_start(jpeg(), metadata) for metadata in JPEG_METADATA)]
    for sound, files in ((png(), pngs), (jpeg(), jpegs)):
        for data in files:
            assert np.array_equal(read_pixels(data), read_pixels(sound)), data[:60]


# Refusals.

FRAME = segment(0xC0, b"\x08\0\x10\0\x10\1\1\x11\0")
DAMAGED = {
    "no image": b"<html></html>",
    "a RIFF file": b"RIFF\4\0\0\0WAVE",
    "a JPEG of a signature": b"\xff\xd8\xff",
    "a JPEG of an end": b"\xff\xd8\xff\xd9",
    "a JPEG without a frame": b"\xff\xd8" + segment(0xDA, bytes(6)) + b"\xff\xd9",
    "a JPEG of two frames": after_start(jpeg(), FRAME),
    "a JPEG of a frame in its data": jpeg()[:-2] + FRAME + b"\xff\xd9",
    "a JPEG of no size": b"\xff\xd8" + FRAME.replace(b"\0\x10", b"\0\0") + segment(0xDA, bytes(6)),
    "a JPEG with a long segment": b"\xff\xd8\xff\xe0\xff\xff" + bytes(9),
    "a JPEG with an unknown segment": after_start(jpeg(), segment(0xF7)),
    "a PNG of a signature": png()[:8],
    "a PNG cut in its size": png()[:20],
    "a PNG cut in its data": png()[:-40],
    "a PNG damaged in its data": png()[:60] + bytes([png()[60] ^ 1]) + png()[61:],
    "a PNG without data": png()[:33] + chunk(b"IEND"),
    "a PNG without a palette": png_without_palette(),
    "a PNG of three bits": png()[:24] + b"\3" + png()[25:],
    "a PNG with a chunk of no type": after_size(png(), chunk(b"a\0\0\0")),
    "a WebP of a head": encoded(PICTURE, "WEBP")[:15],
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
}  # fmt: skip


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


def test_limits_of_pixels_apply_before_decoding() -> None:
    limits = PayloadLimits(max_image_pixels=100, max_image_side=50)
    for data in (jpeg(11, 11), png(11, 11), encoded(Image.new("RGB", (11, 11)), "WEBP")):
        with pytest.raises(TooLarge, match="11 × 11 pixels; the limit is 100"):
            read_pixels(data, limits=limits)
    with pytest.raises(TooLarge, match="the limit is 50 pixels per side"):
        read_pixels(png(51, 1), limits=limits)


def test_cost_of_the_images_of_an_input_is_limited_where_it_is_asked_for() -> None:
    """The scans of a JPEG count as well."""
    limits = PayloadLimits(max_cost_pixels=2 * 256)
    reader = ImageReader(SPEC, limits, "X")
    assert [reader.read(png()).shape for _ in range(2)] == [(16, 16, 3)] * 2
    for costly, data in ((reader, png()), (ImageReader(SPEC, limits, "X"), jpeg_of_scans(64))):
        with pytest.raises(CostlyImages):
            costly.read(data)


# Whatever is done to a sound file.

Change = Callable[[bytearray], None]


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    data = bytearray(FILES[draw(st.sampled_from(sorted(FILES)))])
    near = draw(st.sampled_from([40, 300, len(data)]))
    for _ in range(draw(st.integers(1, 6))):
        data[draw(st.integers(0, min(near, len(data)) - 1))] = draw(
            st.sampled_from([0, 1, 0xFF, 0xD8, 0xDA]) | st.integers(0, 255)
        )
    if draw(st.integers(0, 9)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@given(mutated_files())
def test_mutated_image_is_decoded_or_refused(data: bytes) -> None:
    limits = PayloadLimits(max_image_pixels=100_000)
    for mode, height in (("RGB", -1), ("L", 5), ("RGBA", -1)):
        with suppress(GatewayError):
            spec = ImageSpec(ChannelLayout.CHANNELS_LAST, mode, height, height)
            read_pixels(data, spec, limits)


@given(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF"]), st.binary(max_size=300))
def test_drawn_bytes_are_an_image_or_refused(start: bytes, data: bytes) -> None:
    with suppress(GatewayError):
        read_pixels(start + data)
