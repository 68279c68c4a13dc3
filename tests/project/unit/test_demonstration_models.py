"""The image pipeline of triton_repo: pictures by their values, parameters, and labels."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.digits.serving import encoded, serving_module

pytestmark = pytest.mark.long


picture = serving_module("preprocessing.1.picture")
transforms = serving_module("preprocessing.1.transforms")
ranking = serving_module("postprocessing.1.ranking")

LIMIT = 25_000_000
TEN = [str(digit) for digit in range(10)]


def saved(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(values: Any) -> bytes:
    return saved(Image.fromarray(np.asarray(values)))


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(picture.decode(data, LIMIT))


@pytest.fixture(scope="module")
def ink() -> Any:
    return transforms.preprocessing({"transform": "ink"})


# The transform `photo`


def photo(**parameters: str) -> Any:
    return transforms.preprocessing({"transform": "photo", **parameters})


@pytest.mark.parametrize(
    ("height", "width", "colour"),
    # Were the thin photo enlarged before it is cropped, it would be tens of millions of pixels wide.
    [(300, 500, (200, 100, 30)), (1, 200_000, (0, 0, 0))],
    ids=["usual", "long and thin"],
)
def test_photo_without_parameters_is_normalised_as_for_imagenet(
    height: int, width: int, colour: tuple[int, int, int]
) -> None:
    tensor = photo()(png(np.full((height, width, 3), colour, np.uint8)))
    assert tensor.shape == (3, 224, 224)
    assert tensor.dtype == np.float32
    expected = (np.array(colour) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    np.testing.assert_allclose(tensor[:, 0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(tensor[:, -1, -1], expected, rtol=1e-5)


def test_photo_has_the_layout_scale_and_colour_of_the_parameters() -> None:
    raw = {"scale": "1", "mean": "0,0,0", "std": "1, 1, 1", "fit": "stretch"}
    values = np.random.default_rng(2).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    size = {"width": "6", "height": "8"}
    np.testing.assert_array_equal(photo(**raw, **size, layout="NHWC")(png(values)), values)
    np.testing.assert_array_equal(photo(**raw, **size)(png(values)), values.transpose(2, 0, 1))
    grey = photo(fit="stretch", color="L", mean="0.5", std="1/2", **size)(png(values[..., 0]))
    np.testing.assert_allclose(grey[0], values[..., 0] / 127.5 - 1, atol=1e-6)


# Decoding


PALETTE = Image.new("P", (3, 1))
PALETTE.putpalette([200, 0, 0, 0, 0, 90, 9, 9, 9])
PALETTE.putdata([0, 1, 2])
RED = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
# A transparent pixel is white paper, whatever colour it hides.
TRANSPARENT = np.array([[[10, 20, 30, 255], [10, 20, 30, 255], [1, 2, 3, 0]]], np.uint8)


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"),
    [
        (png(np.array([[0, 257, 25_700, 65_535]], np.uint16)), [[0, 1, 100, 255]], 0),
        (png(TRANSPARENT), [[[10, 20, 30], [10, 20, 30], [255, 255, 255]]], 0),
        (saved(PALETTE), [[[200, 0, 0], [0, 0, 90], [9, 9, 9]]], 0),
        (saved(PALETTE, transparency=2), [[[200, 0, 0], [0, 0, 90], [255, 255, 255]]], 0),
        (saved(RED, "JPEG", quality=95), np.full((16, 16, 3), (255, 0, 0)), 6),
    ],
    ids=["sixteen bits", "transparent", "palette", "transparent palette", "cmyk"],
)
def test_decode_of_a_colour_mode_gives_its_pixels(
    data: bytes, expected: Any, tolerance: int
) -> None:
    found = pixels(data)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found.astype(int), expected, rtol=0, atol=tolerance)


def test_decode_of_an_unusable_image_says_why(subtests: pytest.Subtests) -> None:
    foreign = r"neither JPEG, PNG nor WebP$"
    cases = [
        ("html", b"<html><body>Not found</body></html>", foreign),
        ("gif", saved(Image.new("L", (9, 9)), "GIF"), foreign),
        ("one byte", b"\0", foreign),
        ("nothing", b"", r"^the image is empty$"),
    ]
    for side in (5_001, 9_000):
        # The pixels are cut off: the refusal must come before they are decoded.
        header = saved(Image.new("1", (side, side)))[:100]
        sentence = r"too large: .*the limit is 25000000 pixels"
        cases.append((f"{side} pixels wide", header, sentence))
    noise = np.random.default_rng(4).integers(0, 256, (60, 80), dtype=np.uint8)
    for image_format in ("JPEG", "PNG", "WEBP"):
        whole = encoded(Image.fromarray(noise), image_format)
        for share in (0.05, 0.5, 0.95):
            part = whole[: int(len(whole) * share)]
            cases.append((f"{share} of a {image_format}", part, r"^the image is truncated$"))
    for name, data, sentence in cases:
        with subtests.test(name), pytest.raises(picture.PictureError, match=sentence):
            pixels(data)


@pytest.mark.fault(
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
def test_ink_of_damaged_bytes_raises_only_a_picture_error(ink: Any) -> None:
    rng = np.random.default_rng(5)
    image = Image.fromarray(rng.integers(0, 256, (60, 80), dtype=np.uint8))
    valid = [encoded(image, form) for form in ("JPEG", "PNG", "WEBP")]
    outcomes = set()
    for round_ in range(150):
        data = bytearray(valid[round_ % 3])
        for _ in range(int(rng.integers(1, 6))):
            data[rng.integers(len(data))] = rng.integers(256)
        try:
            ink(bytes(data))
        except picture.PictureError as error:
            outcomes.add(str(error))
    assert "the image is damaged and cannot be decoded" in outcomes


# Parameters


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "parameter transform is missing; it must be one of ink, photo"),
        ({"transform": "paint"}, "transform must be one of ink, photo, not 'paint'"),
        (
            {"transform": "ink", "sice": "9"},
            "unknown parameter sice; valid parameters are size, low",
        ),
        ({"transform": "ink", "size": "big"}, "size must be an integer, not 'big'"),
        ({"transform": "ink", "size": "400"}, "size must be between 4 and 64, not 400"),
        ({"transform": "ink", "low": "1"}, "low (1.0) must be less than high (1.0)"),
        ({"transform": "ink", "max_pixels": "0"}, "max_pixels must be between 1 and"),
        ({"transform": "photo", "fit": "zoom"}, "fit must be one of crop, stretch, not 'zoom'"),
        ({"transform": "photo", "scale": "nan"}, "scale must be a number, not 'nan'"),
        ({"transform": "photo", "std": "1,1,0"}, "std must not be zero"),
        ({"transform": "photo", "mean": "1,,2"}, "mean must be numbers separated by commas"),
        ({"transform": "photo", "color": "L"}, "mean must have 1 numbers for the color L, not 3"),
        ({"transform": "photo", "resize": "9"}, "resize (9) must not be less than width"),
    ],
)
def test_preprocessing_with_a_wrong_parameter_says_what_is_wrong(
    parameters: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is what is tested
        transforms.preprocessing(parameters)
    assert sentence in str(caught.value)


# Labels and probabilities


def result(rank: Any, *scores: float) -> Any:
    return json.loads(rank(np.array(scores, np.float32), TEN[: len(scores)]))


@pytest.mark.parametrize(
    ("options", "scores", "predictions", "doubtful"),
    [
        # The sum of the exponentials of these scores would overflow.
        ({"top_k": 2}, [1000, 998, -1000], [("0", 0.880797), ("1", 0.119203)], False),
        ({}, [1, 1, 1], [(label, 0.333333) for label in "012"], True),
        ({"doubt_below": 0.3}, [1, 1, 1], [(label, 0.333333) for label in "012"], False),
        ({"top_k": 1, "activation": "none"}, [0.25, 0.75], [("1", 0.75)], False),
    ],
    ids=["softmax", "doubtful", "lower limit of doubt", "no activation"],
)
def test_ranking_gives_the_likeliest_labels_and_their_doubt(
    options: dict[str, Any],
    scores: list[float],
    predictions: list[tuple[str, float]],
    doubtful: bool,
) -> None:
    assert result(ranking.Ranking(**options), *scores) == {
        "predictions": [
            {"label": label, "probability": probability} for label, probability in predictions
        ],
        "doubtful": doubtful,
    }
