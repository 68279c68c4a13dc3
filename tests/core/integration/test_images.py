"""Encoded images become what the model's shape asks for, judged by values, on the real tritonserver."""

from __future__ import annotations

import base64
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
import pytest
from PIL import Image

from tests.support.errors import assert_error
from tests.support.images import encoded
from tests.support.model_zoo.zoo import Zoo, any_names

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
# A picture in which no two corners are alike: 4 wide, 6 high, as the fixed models want it.
PICTURE = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3


def seen(zoo: Zoo, model: str, *images: bytes) -> np.ndarray:
    """What the model got."""
    files = [("any", ("picture", image, "image/png")) for image in images]
    outputs = zoo.outputs(zoo.post(model, files=files))
    return np.array(outputs["Y"])


@pytest.mark.long
def test_channels_first(zoo: Zoo) -> None:
    for model in ("nchw", "nchw_guessed"):
        assert seen(zoo, model, encoded(PICTURE)).tolist() == PICTURE.transpose(2, 0, 1).tolist()


def test_channels_last(zoo: Zoo) -> None:
    assert seen(zoo, "nhwc", encoded(PICTURE)).tolist() == PICTURE.tolist()


def test_an_image_of_any_size_keeps_its_own(zoo: Zoo) -> None:
    assert seen(zoo, "nhwc_free", encoded(PICTURE[:5])).tolist() == PICTURE[:5].tolist()
    assert seen(zoo, "nchw_free", encoded(PICTURE[:, :3])).shape == (3, 6, 3)


def test_a_model_with_a_batch_dimension_of_its_own(zoo: Zoo) -> None:
    assert seen(zoo, "own_batch", encoded(PICTURE)).tolist() == [
        PICTURE.transpose(2, 0, 1).tolist()
    ]
    twice = seen(zoo, "free_batch", encoded(PICTURE), encoded(PICTURE[::-1].copy()))
    assert twice.tolist() == [PICTURE.tolist(), PICTURE[::-1].tolist()]


def test_several_images_are_a_batch(zoo: Zoo) -> None:
    images = [encoded(np.roll(PICTURE, shift)) for shift in range(20)]
    got = seen(zoo, "nhwc", *images)
    assert got.tolist() == [np.roll(PICTURE, shift).tolist() for shift in range(20)]


def test_images_of_different_sizes_are_no_batch(zoo: Zoo) -> None:
    files = [("x", ("a", encoded(PICTURE))), ("x", ("b", encoded(PICTURE[:5])))]
    assert_error(zoo.post("nhwc_free", files=files), 422, "DOES_NOT_FIT_MODEL", "different shapes")
    both = [{"b64": base64.b64encode(data).decode()} for _, (_, data) in files]
    assert_error(zoo.infer("nhwc_free", both), 422, "DOES_NOT_FIT_MODEL", "different sizes")


def test_images_in_json(zoo: Zoo) -> None:
    value = base64.b64encode(encoded(PICTURE)).decode()
    for given in ({"b64": value}, f"data:image/png;base64,{value}"):
        assert zoo.outputs(zoo.infer("nhwc", given))["Y"] == PICTURE.tolist()
    batch = zoo.outputs(zoo.infer("nhwc", [{"b64": value}, {"b64": value}]))["Y"]
    assert batch == [PICTURE.tolist(), PICTURE.tolist()]
    rows = zoo.post("nhwc", ":predict", json={"instances": [{"b64": value}]}).json()["predictions"]
    assert rows[0][zoo.names.tensor("Y")] == PICTURE.tolist()


def test_colours_are_in_the_order_red_green_blue(zoo: Zoo) -> None:
    for colour in (RED, GREEN, BLUE):
        for kind in ("PNG", "WEBP"):
            picture = encoded(Image.new("RGB", (4, 6), colour), kind, lossless=True)
            assert seen(zoo, "nchw", picture)[:, 0, 0].tolist() == list(colour)
        jpeg = encoded(Image.new("RGB", (4, 6), colour), "JPEG", quality=100)
        assert np.abs(seen(zoo, "nchw", jpeg)[:, 3, 2] - colour).max() <= 3


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(zoo: Zoo, orientation: int) -> None:
    """The stored picture is turned so that, upright, its corners are the same for all eight."""
    upright = Image.new("RGB", (40, 60), WHITE)
    upright.paste(RED, (0, 0, 20, 30))
    upright.paste(GREEN, (20, 0, 40, 30))
    upright.paste(BLUE, (0, 30, 20, 60))
    undo = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for turn in undo.get(orientation, []):
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind, options in (
        ("JPEG", {"quality": 98, "subsampling": 0}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
    ):
        got = seen(zoo, "nhwc_free", encoded(stored, kind, exif=exif, **options))
        assert got.shape == (60, 40, 3)
        corners = [got[5, 5], got[5, 35], got[55, 5], got[55, 35]]
        for corner, colour in zip(corners, (RED, GREEN, BLUE, WHITE), strict=True):
            assert np.abs(corner - np.array(colour)).max() <= 12, (kind, corner, colour)
        small = seen(zoo, "nhwc", encoded(stored, kind, exif=exif, **options))
        assert small[0, 0].argmax() == 0
        assert small[0, 3].argmax() == 1
        assert small[5, 0].argmax() == 2


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
def test_sixteen_bits_are_scaled_and_not_clipped(zoo: Zoo) -> None:
    deep = np.array([[0, 257, 25700], [32896, 51400, 65535]], np.uint16)
    got = seen(zoo, "grey_nchw", encoded(Image.fromarray(deep)))
    assert got.tolist() == [[[0, 1, 100], [128, 200, 255]]]
    assert seen(zoo, "nhwc_free", encoded(Image.fromarray(deep)))[1, 2].tolist() == list(WHITE)


def test_transparency_is_laid_on_white(zoo: Zoo) -> None:
    rgba = np.zeros((6, 4, 4), np.uint8)
    rgba[:, :2] = (255, 0, 0, 255)
    rgba[:, 2:] = (0, 0, 0, 0)
    got = seen(zoo, "nhwc", encoded(rgba))
    assert got[0, 0].tolist() == list(RED)
    assert got[0, 3].tolist() == list(WHITE)
    assert seen(zoo, "rgba", encoded(rgba)).tolist() == rgba.tolist()
    assert seen(zoo, "rgba", encoded(PICTURE))[0, 0].tolist() == [0, 3, 6, 255]


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
def test_a_palette_with_transparency(zoo: Zoo) -> None:
    image = Image.new("P", (4, 6), 1)
    image.putpalette([*RED, *BLUE])
    image.paste(0, (0, 0, 2, 6))
    got = seen(zoo, "nhwc", encoded(image, transparency=1))
    assert got[0, 0].tolist() == list(RED)
    assert got[0, 3].tolist() == list(WHITE)
    opaque = seen(zoo, "nhwc", encoded(image))
    assert opaque[0, 3].tolist() == list(BLUE)


@pytest.mark.fault("CMYK, palettes with transparency, 16-bit grayscale, EXIF orientation")
def test_cmyk_grey_and_black_and_white(zoo: Zoo) -> None:
    cmyk = encoded(Image.new("RGB", (4, 6), RED).convert("CMYK"), "JPEG", quality=100)
    assert np.abs(seen(zoo, "nhwc", cmyk)[3, 2] - RED).max() <= 4
    assert seen(zoo, "nhwc", encoded(Image.new("L", (4, 6), 77)))[0, 0].tolist() == [77, 77, 77]
    assert seen(zoo, "nhwc", encoded(Image.new("1", (4, 6), 1)))[0, 0].tolist() == list(WHITE)
    weights = seen(zoo, "grey_nchw", encoded(Image.new("RGB", (4, 6), GREEN)))
    assert weights[0, 0, 0] == pytest.approx(150, abs=1)
    assert seen(zoo, "grey_plain", encoded(Image.new("L", (3, 2), 9))).tolist() == [[9] * 3] * 2


def test_an_image_is_resized_to_a_fixed_size(zoo: Zoo) -> None:
    large = Image.new("RGB", (400, 600), RED)
    large.paste(BLUE, (200, 0, 400, 600))
    for kind in ("PNG", "JPEG", "WEBP"):
        got = seen(zoo, "nhwc", encoded(large, kind))
        assert got.shape == (6, 4, 3)
        assert np.abs(got[3, 0] - RED).max() <= 6
        assert np.abs(got[3, 3] - BLUE).max() <= 6


@any_names
def test_hints_scale_images(zoo: Zoo) -> None:
    first = PICTURE.transpose(2, 0, 1)
    assert np.allclose(seen(zoo, "unit", encoded(PICTURE)), first / 255, atol=1e-6)
    assert np.allclose(seen(zoo, "centred", encoded(PICTURE)), PICTURE / 127.5 - 1, atol=1e-6)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (first / 255 - mean[:, None, None]) / std[:, None, None]
    assert np.allclose(seen(zoo, "standard", encoded(PICTURE)), expected, atol=1e-5)


def test_hints_leave_arrays_as_they_are(zoo: Zoo) -> None:
    array = PICTURE.transpose(2, 0, 1).tolist()
    assert zoo.outputs(zoo.infer("standard", array))["Y"] == array


def test_datatypes_of_images(zoo: Zoo) -> None:
    assert seen(zoo, "half", encoded(PICTURE)).tolist() == PICTURE.transpose(2, 0, 1).tolist()
    response = zoo.post("signed", content=encoded(PICTURE), headers={"Content-Type": "image/png"})
    assert_error(response, 422, "DOES_NOT_FIT_MODEL", "do not fit; set gateway.scale")


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    body = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


@pytest.mark.fault(
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"", 422, "BAD_IMAGE", "is empty"),
        (b"<html></html>", 422, "BAD_IMAGE", "not a JPEG, PNG or WebP image"),
        (
            encoded(Image.new("RGB", (9, 9)), "GIF"),
            422,
            "BAD_IMAGE",
            "not a JPEG, PNG or WebP image",
        ),
        (
            encoded(Image.new("RGB", (9, 9)), "BMP"),
            422,
            "BAD_IMAGE",
            "not a JPEG, PNG or WebP image",
        ),
        (encoded(Image.effect_noise((99, 99), 50), "JPEG")[:-400], 422, "BAD_IMAGE", "truncated"),
        (encoded(Image.effect_noise((99, 99), 50))[:-400], 422, "BAD_IMAGE", "truncated"),
        (encoded(Image.effect_noise((99, 99), 50), "WEBP")[:-400], 422, "BAD_IMAGE", "damaged"),
        (encoded(PICTURE)[:20], 422, "BAD_IMAGE", "damaged"),
        (png_of(13_000, 13_000), 413, "TOO_LARGE", "13000 × 13000 pixels"),
        (png_of(20_000, 10), 413, "TOO_LARGE", "16384 pixels per side"),
        (png_of(100, 100), 422, "BAD_IMAGE", "truncated"),
    ],
)
def test_an_image_that_is_none(zoo: Zoo, body: bytes, status: int, code: str, words: str) -> None:
    response = zoo.post("nhwc", content=body, headers={"Content-Type": "image/png"})
    assert_error(response, status, code, words)
    assert f"'{zoo.names.tensor('X')}'" in response.json()["error"]


@pytest.mark.long
@pytest.mark.fault("32 images of 25 megapixels at once")
def test_large_images_do_not_hold_up_others(zoo: Zoo) -> None:
    """Decoding is off the event loop, and bounded: 8 images of 24 megapixels at once.

    On the loop, there would be one or two answers to others for each image.
    """
    count = 8
    large = encoded(Image.new("RGB", (6000, 4000), RED))
    zoo.load("nhwc")

    def post() -> int:
        headers = {"Content-Type": "image/png"}
        return zoo.post("nhwc", content=large, headers=headers).status_code

    waits = []
    with ThreadPoolExecutor(count) as pool:
        posts = [pool.submit(post) for _ in range(count)]
        while not all(one.done() for one in posts):
            began = time.monotonic()
            assert zoo.client.get("/livez").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.005)
    assert [one.result() for one in posts] == [200] * count
    print(f"{len(waits)} answers to others meanwhile, each in {median(waits) * 1e3:.1f} ms")
    assert len(waits) > 3 * count
