"""The image pipeline of triton_repo: its pictures by their values, its digits by their accuracy."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from models.digits.drawing import Paper, Pen, drawn
from models.digits.evaluate import drawn_accuracy, held_out_accuracy, printed_accuracies
from models.digits.serving import ROOT, encoded, labels_of, serving_module

picture = serving_module("preprocessing.1.picture")
transforms = serving_module("preprocessing.1.transforms")
ranking = serving_module("postprocessing.1.ranking")

LIMIT = 25_000_000
TEN = [str(digit) for digit in range(10)]


def png(values: Any, **options: Any) -> bytes:
    buffer = BytesIO()
    Image.fromarray(np.asarray(values)).save(buffer, "PNG", **options)
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(picture.decode(data, LIMIT))


def digit(label: int, *, size: tuple[int, int] = (200, 260), **paper: Any) -> Image.Image:
    rng = np.random.default_rng(3)
    return drawn(label, Pen(shake=0.01), Paper(size=size, **paper), rng)


# How often the network is right


@pytest.mark.long
def test_held_out_handwriting_is_recognised() -> None:
    assert held_out_accuracy() >= 0.99


@pytest.mark.long
def test_drawn_digits_on_any_paper_are_recognised() -> None:
    assert drawn_accuracy(300) >= 0.97


@pytest.mark.long
def test_fonts_that_were_not_trained_on_are_recognised() -> None:
    accuracies = printed_accuracies()
    assert len(accuracies) == 9
    assert min(accuracies.values()) >= 0.97, accuracies


def test_the_sample_pictures_of_the_documentation_are_recognised() -> None:
    images = [Image.open(ROOT / "docs" / "images" / name) for name in ("seven.png", "three.jpg")]
    assert labels_of(images).tolist() == [7, 3]


# The transform `ink`


@pytest.fixture(scope="module")
def ink() -> Any:
    return transforms.preprocessing({"transform": "ink"})


def test_ink_is_a_square_of_values_between_0_and_1(ink: Any) -> None:
    tensor = ink(encoded(digit(7)))
    assert tensor.shape == ink.shape == (1, 16, 16)
    assert tensor.dtype == np.float32
    assert (tensor.min(), tensor.max()) == (0, 1)


def test_ink_has_the_size_and_range_of_the_parameters() -> None:
    wide = transforms.preprocessing({"transform": "ink", "size": "28", "low": "-1", "high": "1"})
    tensor = wide(encoded(digit(7)))
    assert tensor.shape == (1, 28, 28)
    assert (tensor.min(), tensor.max()) == (-1, 1)


def test_dark_on_light_and_light_on_dark_are_the_same_ink(ink: Any) -> None:
    image = digit(5)
    inverted = ImageOps.invert(image)
    np.testing.assert_allclose(ink(encoded(image)), ink(encoded(inverted)), atol=0.02)


def test_ink_does_not_depend_on_where_it_lies_nor_on_the_format(ink: Any) -> None:
    here, there = digit(4, centre=(0.35, 0.35)), digit(4, centre=(0.65, 0.6))
    np.testing.assert_allclose(ink(encoded(here)), ink(encoded(there)), atol=0.15)
    np.testing.assert_allclose(ink(encoded(here)), ink(encoded(here, "JPEG")), atol=0.15)


def test_a_large_jpeg_gives_the_ink_of_a_small_one(ink: Any) -> None:
    small, large = digit(2), digit(2, size=(1600, 2080))
    np.testing.assert_allclose(ink(encoded(small)), ink(encoded(large, "JPEG")), atol=0.25)
    assert np.abs(ink(encoded(small)) - ink(encoded(large, "JPEG"))).mean() < 0.02


@pytest.mark.parametrize("colour", [0, 255])
def test_a_drawing_on_nothing_is_found_in_dark_and_in_light_ink(ink: Any, colour: int) -> None:
    alpha = ImageOps.invert(digit(3, ground=255, ink=0))
    layer = Image.new("RGB", alpha.size, (colour, colour, colour))
    layer.putalpha(alpha)
    on_paper = ink(encoded(digit(3, ground=255, ink=0)))
    np.testing.assert_allclose(ink(encoded(layer)), on_paper, atol=0.02)


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_a_blank_picture_has_no_ink(ink: Any, grey: int) -> None:
    rng = np.random.default_rng(1)
    noisy = np.clip(rng.normal(grey, 6, (120, 160)), 0, 255).astype(np.uint8)
    for blank in (noisy, np.full((120, 160), grey, np.uint8), np.full((1, 1), grey, np.uint8)):
        with pytest.raises(picture.PictureError, match="no ink found: the picture is blank"):
            ink(png(blank))


# The transform `photo`


def photo(**parameters: str) -> Any:
    return transforms.preprocessing({"transform": "photo", **parameters})


def test_a_photo_is_224_by_224_normalised_as_for_imagenet() -> None:
    tensor = photo()(png(np.full((300, 500, 3), (200, 100, 30), np.uint8)))
    assert tensor.shape == (3, 224, 224)
    assert tensor.dtype == np.float32
    expected = (np.array([200, 100, 30]) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    np.testing.assert_allclose(tensor[:, 0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(tensor[:, -1, -1], expected, rtol=1e-5)


def test_a_photo_has_the_layout_scale_and_colour_of_the_parameters() -> None:
    raw = {"scale": "1", "mean": "0,0,0", "std": "1, 1, 1", "fit": "stretch"}
    values = np.random.default_rng(2).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    size = {"width": "6", "height": "8"}
    np.testing.assert_array_equal(photo(**raw, **size, layout="NHWC")(png(values)), values)
    np.testing.assert_array_equal(photo(**raw, **size)(png(values)), values.transpose(2, 0, 1))
    grey = photo(fit="stretch", color="L", mean="0.5", std="1/2", **size)(png(values[..., 0]))
    np.testing.assert_allclose(grey[0], values[..., 0] / 127.5 - 1, atol=1e-6)


def test_a_photo_is_cropped_at_its_centre() -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 12:18] = 255
    crop = {"scale": "1/255", "mean": "0,0,0", "std": "1,1,1", "resize": "10"}
    tensor = photo(**crop, width="6", height="6")(png(wide))
    assert tensor.min() == 1
    stretched = photo(**crop, width="6", height="6", fit="stretch")(png(wide))
    assert stretched[0, 0].tolist()[0] == 0


def test_a_long_thin_photo_costs_no_more_than_another() -> None:
    assert photo()(png(np.zeros((1, 200_000), np.uint8))).shape == (3, 224, 224)


# Decoding


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_is_turned_upright(orientation: int, image_format: str) -> None:
    upright = np.full((48, 32), 255, np.uint8)
    upright[:16, :16] = 0
    # How a camera in that position stores the picture: the inverse of what is to be undone.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: np.rot90(upright, 2).T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    Image.fromarray(stored).save(buffer, image_format, exif=exif, quality=95)
    found = np.asarray(picture.decode(buffer.getvalue(), LIMIT).convert("L"))
    np.testing.assert_allclose(found.astype(int), upright.astype(int), atol=20)


def test_sixteen_bits_of_grey_are_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 25_700, 65_535]], np.uint16)
    assert pixels(png(values)).tolist() == [[0, 1, 100, 255]]


def test_transparent_pixels_are_white_paper_whatever_colour_they_hide() -> None:
    half = np.array([[[10, 20, 30, 255], [10, 20, 30, 255], [1, 2, 3, 0]]], np.uint8)
    assert pixels(png(half)).tolist() == [[[10, 20, 30], [10, 20, 30], [255, 255, 255]]]


def test_a_palette_is_looked_up_and_its_transparent_colour_is_paper() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([200, 0, 0, 0, 0, 90, 9, 9, 9])
    image.putdata([0, 1, 2])
    plain, transparent = BytesIO(), BytesIO()
    image.save(plain, "PNG")
    image.save(transparent, "PNG", transparency=2)
    assert pixels(plain.getvalue()).tolist() == [[[200, 0, 0], [0, 0, 90], [9, 9, 9]]]
    assert pixels(transparent.getvalue()).tolist() == [[[200, 0, 0], [0, 0, 90], [255, 255, 255]]]


def test_cmyk_becomes_rgb() -> None:
    buffer = BytesIO()
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(buffer, "JPEG", quality=95)
    red = pixels(buffer.getvalue())[8, 8]
    np.testing.assert_allclose(red.astype(int), [255, 0, 0], atol=6)


@pytest.mark.parametrize("side", [5_001, 9_000])
def test_too_many_pixels_are_refused_before_they_are_decoded(side: int) -> None:
    buffer = BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    broken_off = buffer.getvalue()[:100]
    with pytest.raises(picture.PictureError, match=r"too large: .*the limit is 25000000 pixels"):
        picture.decode(broken_off, LIMIT)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_cut_image_is_called_truncated(image_format: str, share: float) -> None:
    rng = np.random.default_rng(4)
    data = encoded(Image.fromarray(rng.integers(0, 256, (60, 80), dtype=np.uint8)), image_format)
    with pytest.raises(picture.PictureError, match=r"^the image is truncated$"):
        pixels(data[: int(len(data) * share)])


def test_what_is_no_image_is_refused_in_one_sentence() -> None:
    gif = BytesIO()
    Image.new("L", (9, 9)).save(gif, "GIF")
    for data in (b"<html><body>Not found</body></html>", gif.getvalue(), b"\0"):
        with pytest.raises(picture.PictureError, match=r"neither JPEG, PNG nor WebP$"):
            pixels(data)
    with pytest.raises(picture.PictureError, match=r"^the image is empty$"):
        pixels(b"")


@pytest.mark.fault(
    "images that are invalid, truncated, of another format, or claim 13,000 × 13,000"
)
def test_damaged_bytes_never_raise_anything_but_a_picture_error(ink: Any) -> None:
    rng = np.random.default_rng(5)
    valid = [encoded(digit(6, size=(60, 80)), form) for form in ("JPEG", "PNG", "WEBP")]
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
def test_a_wrong_parameter_is_explained(parameters: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is what is tested
        transforms.preprocessing(parameters)
    assert sentence in str(caught.value)


def test_parameters_of_triton_and_of_the_gateway_are_not_ours() -> None:
    parameters = serving_module("preprocessing.1.parameters")
    given = {"EXECUTION_ENV_PATH": "x", "gateway.content_type.image": "image/*", "size": "16"}
    config = {"parameters": {name: {"string_value": value} for name, value in given.items()}}
    assert parameters.own_parameters(config) == {"size": "16"}


# Labels and probabilities


def result(rank: Any, *scores: float) -> Any:
    return json.loads(rank(np.array(scores, np.float32), TEN[: len(scores)]))


def test_the_likeliest_labels_come_first_and_softmax_does_not_overflow() -> None:
    answer = result(ranking.Ranking(top_k=2), 1000.0, 998.0, -1000.0)
    assert answer == {
        "predictions": [
            {"label": "0", "probability": 0.880797},
            {"label": "1", "probability": 0.119203},
        ],
        "doubtful": False,
    }


def test_a_first_probability_below_the_limit_is_doubtful() -> None:
    assert result(ranking.Ranking(), 1, 1, 1)["doubtful"]
    assert not result(ranking.Ranking(doubt_below=0.3), 1, 1, 1)["doubtful"]


def test_without_activation_the_scores_are_the_probabilities() -> None:
    answer = result(ranking.Ranking(activation="none", top_k=1), 0.25, 0.75)
    assert answer["predictions"] == [{"label": "1", "probability": 0.75}]


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_an_error_and_not_broken_json(score: float) -> None:
    with pytest.raises(ranking.ScoresError, match="not finite"):
        result(ranking.Ranking(), 1, score)


def test_a_label_file_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    for content, sentence in ((None, "cannot read"), ("", "is empty"), ("a\n\nb", "empty line")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=sentence):
            ranking.read_labels(path)
    path.write_text("an apple\nÄpfel\n", encoding="utf-8")
    assert ranking.read_labels(path) == ["an apple", "Äpfel"]
