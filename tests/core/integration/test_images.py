"""Encoded images become what the model's shape asks for, judged by values, on the real tritonserver."""

from __future__ import annotations

import io
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.errors import assert_error
from tests.support.hostile_files import (
    after_size,
    after_start,
    b64,
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
from tests.support.model_zoo.zoo import Zoo, any_names

GREEN = (0, 255, 0)
# A picture in which no two corners are alike: 4 wide, 6 high, as the fixed models want it.
PICTURE = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3
NOISE = Image.fromarray(noise(53, 37))
DEEP = Image.fromarray(noise(40, 30)[..., 0].astype(np.uint16) * 250)
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6
XMP = b'<x:xmpmeta tiff:Orientation="6"/>'
PAGES: dict[str, Any] = {"save_all": True, "append_images": [NOISE.rotate(180)]}
# Formats, their modes, and how each of these is written.
WRITTEN: tuple[tuple[str, str, list[dict[str, Any]]], ...] = (
    ("JPEG", "RGB L CMYK", [{}, {"exif": SIDEWAYS}, {"progressive": True, "subsampling": 0}]),
    ("PNG", "RGB L P 1 LA RGBA", [{}, {"exif": SIDEWAYS, "icc_profile": bytes(200_000)}]),
    ("WEBP", "RGB RGBA", [{}, {"lossless": True, "xmp": XMP}, {"exif": SIDEWAYS, **PAGES}]),
)


def convert(zoo: Zoo, model: str, *images: bytes) -> np.ndarray:
    """Return what the model received."""
    files = [("any", ("picture", image, "image/png")) for image in images]
    outputs = zoo.outputs(zoo.post(model, files=files))
    return np.array(outputs["Y"])


@pytest.mark.long
def test_image_has_the_shape_that_the_model_expects(zoo: Zoo) -> None:
    channels_first = PICTURE.transpose(2, 0, 1)
    wide, narrow = PICTURE[:5], PICTURE[:, :3]
    for model, picture, expected in (
        ("nchw", PICTURE, channels_first),
        ("nchw_guessed", PICTURE, channels_first),
        ("nhwc", PICTURE, PICTURE),
        ("nhwc_free", wide, wide),
        ("nchw_free", narrow, narrow.transpose(2, 0, 1)),
        ("own_batch", PICTURE, channels_first[None]),  # the batch is a dimension of the model
    ):
        assert convert(zoo, model, encoded(picture.copy())).tolist() == expected.tolist(), model
    twice = convert(zoo, "free_batch", encoded(PICTURE), encoded(PICTURE[::-1].copy()))
    assert twice.tolist() == [PICTURE.tolist(), PICTURE[::-1].tolist()]


def test_images_of_one_size_are_a_batch(zoo: Zoo) -> None:
    images = [encoded(np.roll(PICTURE, shift)) for shift in range(20)]
    converted = convert(zoo, "nhwc", *images)
    assert converted.tolist() == [np.roll(PICTURE, shift).tolist() for shift in range(20)]


def test_images_of_different_sizes_are_refused(zoo: Zoo) -> None:
    files = [("x", ("a", encoded(PICTURE))), ("x", ("b", encoded(PICTURE[:5])))]
    assert_error(zoo.post("nhwc_free", files=files), 422, "DOES_NOT_FIT_MODEL", "different shapes")
    both = [b64(data) for _, (_, data) in files]
    assert_error(zoo.infer("nhwc_free", both), 422, "DOES_NOT_FIT_MODEL", "different shapes")


def test_images_as_base64_in_json_are_converted(zoo: Zoo) -> None:
    value = b64(encoded(PICTURE))
    for given in (value, f"data:image/png;base64,{value['b64']}"):
        assert zoo.outputs(zoo.infer("nhwc", given))["Y"] == PICTURE.tolist()
    batch = zoo.outputs(zoo.infer("nhwc", [value, value]))["Y"]
    assert batch == [PICTURE.tolist(), PICTURE.tolist()]
    rows = zoo.post("nhwc", ":predict", json={"instances": [value]}).json()["predictions"]
    assert rows[0][zoo.names.tensor("Y")] == PICTURE.tolist()


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
def test_exif_orientation_is_applied(zoo: Zoo) -> None:
    """The stored picture is turned so that, upright, its corners are the same for all eight."""
    inverse = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    upright = Image.fromarray(PICTURE)
    for orientation in range(1, 9):
        turn = inverse.get(orientation)
        stored = upright if turn is None else upright.transpose(turn)
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("PNG", "WEBP"):
            picture = encoded(stored, kind, lossless=True, exif=exif)
            for model in ("nhwc_free", "nhwc"):
                assert convert(zoo, model, picture).tolist() == PICTURE.tolist(), (
                    orientation,
                    kind,
                )
        jpeg = convert(zoo, "nhwc_free", encoded(stored, "JPEG", quality=98, exif=exif))
        assert np.abs(jpeg - PICTURE.astype(float)).mean() < 20, orientation


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
def test_image_is_decoded_as_by_pillow(zoo: Zoo, subtests: pytest.Subtests) -> None:
    """Those with transparency are laid over white, and 16 bits are scaled."""
    files = [
        (f"{kind} {mode} {[*options]}", encoded(NOISE.convert(mode), kind, **options))
        for kind, modes, written in WRITTEN
        for mode, options in product(modes.split(), written)
    ]
    files.append(("16 bits", encoded(DEEP)))
    files.append(("a transparent colour", encoded(NOISE.convert("P"), transparency=3)))
    for name, data in files:
        image = Image.open(io.BytesIO(data))
        upright = ImageOps.exif_transpose(image)
        if image.mode == "I;16":
            upright = Image.fromarray(np.rint(np.asarray(upright) / 257).astype(np.uint8))
        rgba = upright.convert("RGBA")
        if upright.has_transparency_data:
            rgba = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        with subtests.test(name):
            expected = (rgba if upright.has_transparency_data else upright).convert("RGB")
            assert np.array_equal(convert(zoo, "nhwc_free", data), np.asarray(expected))


def test_channels_are_those_of_the_model(zoo: Zoo) -> None:
    rgba = np.random.default_rng(1).integers(0, 256, (6, 4, 4), np.uint8)
    assert convert(zoo, "rgba", encoded(rgba)).tolist() == rgba.tolist()
    assert convert(zoo, "rgba", encoded(PICTURE))[0, 0].tolist() == [0, 3, 6, 255]
    converted = convert(zoo, "grey_nchw", encoded(Image.new("RGB", (4, 6), GREEN)))
    assert converted[0, 0, 0] == pytest.approx(150, abs=1)
    assert convert(zoo, "grey_plain", encoded(Image.new("L", (3, 2), 9))).tolist() == [[9] * 3] * 2


def test_image_is_resized_to_the_size_of_the_model(zoo: Zoo) -> None:
    """A JPEG, which is decoded at a reduced scale, too."""
    areas = Image.fromarray(noise(4, 6)).resize((400, 600), Image.Resampling.BICUBIC)
    for kind, most in (("PNG", 0), ("JPEG", 8), ("WEBP", 8)):
        expected = areas.resize((4, 6), Image.Resampling.BILINEAR)
        difference = np.abs(
            convert(zoo, "nhwc", encoded(areas, kind)) - np.asarray(expected, float)
        )
        assert difference.max() <= most, kind


@pytest.mark.long
@any_names
def test_hints_scale_images_and_not_arrays(zoo: Zoo) -> None:
    first = PICTURE.transpose(2, 0, 1)
    assert np.allclose(convert(zoo, "unit", encoded(PICTURE)), first / 255, atol=1e-6)
    assert np.allclose(convert(zoo, "centred", encoded(PICTURE)), PICTURE / 127.5 - 1, atol=1e-6)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (first / 255 - mean[:, None, None]) / std[:, None, None]
    assert np.allclose(convert(zoo, "standard", encoded(PICTURE)), expected, atol=1e-5)
    assert zoo.outputs(zoo.infer("standard", first.tolist()))["Y"] == first.tolist()


def test_image_is_converted_to_the_datatype_or_refused(zoo: Zoo) -> None:
    assert convert(zoo, "half", encoded(PICTURE)).tolist() == PICTURE.transpose(2, 0, 1).tolist()
    response = zoo.post("signed", content=encoded(PICTURE), headers={"Content-Type": "image/png"})
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "do not fit; set gateway.scale")


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to nothing in it."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND")


# Metadata that says nothing of the orientation, or is hostile.

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
def test_deviations_and_hostile_metadata_change_no_pixel(zoo: Zoo) -> None:
    pngs = [png()[:-12], *(after_size(png(), metadata) for metadata in PNG_METADATA)]
    # The standard allows padding between segments.
    jpegs = [padded_jpeg(15), *(after_start(jpeg(), metadata) for metadata in JPEG_METADATA)]
    jpegs += [with_exif(jpeg(), block) for block in EXIF_BLOCKS]
    for sound, files in ((png(), pngs), (jpeg(), jpegs), (encoded(NOISE, "WEBP"), [])):
        expected = np.asarray(Image.open(io.BytesIO(sound)))
        for data in (sound, sound + bytes(5000), *files):
            assert np.array_equal(convert(zoo, "nhwc_free", data), expected), data[:60]


FRAME = segment(0xC0, b"\x08\0\x10\0\x10\1\1\x11\0")
DAMAGED = {
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
    "a WebP cut in its data": encoded(NOISE, "WEBP")[:-40],
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
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
def test_image_that_is_invalid_or_too_large_is_refused(zoo: Zoo, subtests: pytest.Subtests) -> None:
    blank = Image.new("RGB", (9, 9))
    large = Image.effect_noise((99, 99), 50)
    of_other_format = "not a JPEG, PNG or WebP image"
    for name, body, code, words in (
        ("empty", b"", "BAD_IMAGE", "is empty"),
        ("HTML", b"<html></html>", "BAD_IMAGE", of_other_format),
        ("GIF", encoded(blank, "GIF"), "BAD_IMAGE", of_other_format),
        ("BMP", encoded(blank, "BMP"), "BAD_IMAGE", of_other_format),
        ("truncated JPEG", encoded(large, "JPEG")[:-400], "BAD_IMAGE", "truncated"),
        ("truncated PNG", encoded(large)[:-400], "BAD_IMAGE", "truncated"),
        ("truncated WebP", encoded(large, "WEBP")[:-400], "BAD_IMAGE", "damaged"),
        ("truncated header", encoded(PICTURE)[:20], "BAD_IMAGE", "damaged"),
        ("too many pixels", png_of(13_000, 13_000), "TOO_LARGE", "13000 × 13000 pixels"),
        ("too wide", png_of(20_000, 10), "TOO_LARGE", "16384 pixels per side"),
        ("larger than its data", png_of(100, 100), "BAD_IMAGE", "truncated"),
        *((name, data, "BAD_IMAGE", "truncated or damaged") for name, data in DAMAGED.items()),
        *((name, data, "TOO_LARGE", words) for name, (data, words) in EXCESSIVE.items()),
    ):
        with subtests.test(name):
            headers = {"Content-Type": "image/png"}
            response = zoo.post("nhwc", content=body, headers=headers)
            assert_error(response, 413 if code == "TOO_LARGE" else 422, code, words)
            assert f"'{zoo.names.tensor('X')}'" in response.json()["error"]
