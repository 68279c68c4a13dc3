"""What clients send that were written for other servers: it is understood, or refused with the remedy."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.errors import assert_error
from tests.support.hostile_files import b64, chunk, npy
from tests.support.images import encoded
from tests.support.model_zoo.zoo import Zoo, any_names

CURL = "application/x-www-form-urlencoded"
JSON = "application/json"
MISMATCH = 422, "DOES_NOT_FIT_MODEL"
UNSUPPORTED = 415, "UNSUPPORTED_BODY"
MALFORMED = 400, "MALFORMED_REQUEST"
LONG = json.dumps({"inputs": "한" * 200_000}, ensure_ascii=False)  # a process decodes it
PIXELS = np.arange(72, dtype=np.uint8).reshape(6, 4, 3)
ARRAY = np.array([[0.5, 1.5]], np.float32)


def picture(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    return encoded(pixels, kind, lossless=True)


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def post(zoo: Zoo, model: str, content_type: str | None, body: bytes) -> httpx.Response:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return zoo.post(model, content=body, headers=headers)


def fields(zoo: Zoo, *values: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Fields of a form without types, and files as they are."""
    names = (zoo.names.tensor(name) for name, _ in values)
    return [
        (name, value if isinstance(value, tuple) else (None, value))
        for name, (_, value) in zip(names, values, strict=True)
    ]


# The type of a body.

GENERIC_TYPES = (None, "application/octet-stream", "binary/octet-stream", CURL)
MARKED = b"\xef\xbb\xbf"


@any_names
def test_bytes_decide_if_the_type_says_nothing(zoo: Zoo, subtests: pytest.Subtests) -> None:
    numbers = {"Y": [[0.5, 1.5]]}
    for model, body, outputs in (
        ("nhwc_free", picture(PIXELS), {"Y": PIXELS.tolist()}),
        ("nhwc_free", picture(PIXELS, "WEBP"), {"Y": PIXELS.tolist()}),
        ("plain_FP32", npy(ARRAY), numbers),
        ("plain_FP32", npz(**{zoo.names.tensor("X"): ARRAY}), numbers),
        ("plain_FP32", b' {"inputs": [[0.5, 1.5]]}', numbers),
        ("single_BYTES", b'{"id": "1", "inputs": "a"}', {"Y": "a"}),
        ("single_BYTES", MARKED + b'{"inputs": "a"}', {"Y": "a"}),
        ("single_BYTES", '{"inputs": "é"}'.encode("utf-16"), {"Y": "é"}),
        ("single_BYTES", b'{"text": {"inputs": "a"}}', {"Y": '{"text": {"inputs": "a"}}'}),
        ("single_BYTES", b"[1, 2]", {"Y": "[1, 2]"}),
        ("single_BYTES", b"{name}, hello", {"Y": "{name}, hello"}),
        ("single_BYTES", b"hello", {"Y": "hello"}),
        ("single_BYTES", npy(ARRAY), {"Y": b64(npy(ARRAY))}),
    ):
        for content_type in GENERIC_TYPES:
            with subtests.test(f"{content_type} {body[:20]!r}"):
                response = post(zoo, model, content_type, body)
                found = zoo.outputs(response)["Y"]
                assert found == outputs["Y"]
    compressed = zoo.post(
        "plain_FP32", content=gzip.compress(npy(ARRAY)), headers={"Content-Encoding": "gzip"}
    )
    assert zoo.outputs(compressed) == numbers
    # The value of the only required input, although there are others.
    value = zoo.post("all_optional", content=b"41.5", headers={"Content-Type": "text/csv"})
    assert_error(value, *UNSUPPORTED, "'text/csv' is not supported")


@any_names
def test_type_that_says_what_a_body_is_is_believed(zoo: Zoo, subtests: pytest.Subtests) -> None:
    latin = '{"inputs": "é"}'.encode("latin-1")
    for model, content_type, body, value in (
        ("single_BYTES", "text/json", b'{"inputs": "a"}', "a"),
        ("single_BYTES", "application/vnd.api+json; v=1", b'{"inputs": "a"}', "a"),
        ("single_BYTES", "application/problem+json", b'{"inputs": "a"}', "a"),
        ("single_BYTES", f"{JSON}; charset=iso-8859-1", latin, "é"),
        ("single_BYTES", f"{JSON}; charset=UTF-16LE", '{"inputs": "é"}'.encode("utf-16-le"), "é"),
        ("single_BYTES", f"{JSON}; charset=utf-8", MARKED + b'{"inputs": "a"}', "a"),
        ("single_BYTES", f"{JSON}; charset=gb18030", LONG.encode("gb18030"), "한" * 200_000),
        ("single_BYTES", "text/plain", b'{"inputs": "a"}', '{"inputs": "a"}'),
        ("single_BYTES", "text/plain", MARKED + b"a", "\ufeffa"),
        ("single_BYTES", "audio/wav", b"RIFF\xff\0\0\0WAVE", b64(b"RIFF\xff\0\0\0WAVE")),
        ("single_BYTES", "video/mp4", b"\0\0\0\x18ftypmp42", "\0\0\0\x18ftypmp42"),
        ("single_BYTES", "application/pdf", b"%PDF-1.7", "%PDF-1.7"),
        ("single_BYTES", "text/html; charset=latin-1", b"<p>\xe9", b64(b"<p>\xe9")),
        ("single_BYTES", "text/csv", b"a,b\r\n", "a,b\r\n"),
        ("nhwc_free", "image/png", picture(PIXELS, "WEBP"), PIXELS.tolist()),
        ("nhwc_free", "image/heic", picture(PIXELS), PIXELS.tolist()),
    ):
        with subtests.test(f"{content_type} {body[:20]!r}"):
            assert zoo.outputs(post(zoo, model, content_type, body))["Y"] == value


def test_json_of_other_apis_is_read_in_its_charset(zoo: Zoo) -> None:
    headers = {"Content-Type": f"{JSON}; charset=utf-16"}
    rows = '{"instances": ["é"]}'.encode("utf-16")
    predicted = zoo.post("single_BYTES", ":predict", content=rows, headers=headers)
    assert predicted.json() == {"predictions": ["é"]}
    zoo.load("vectors")
    headers = {"Content-Type": f"{JSON}; charset=latin-1"}
    texts = '{"model": "vectors", "input": "éé"}'.encode("latin-1")
    found = zoo.client.post("/v1/embeddings", content=texts, headers=headers).json()
    assert found["data"][0]["embedding"] == [-5, -6, -7, -8]


def test_body_that_nothing_explains_is_refused(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for model, content_type, body, error, words in (
        ("nhwc_free", "text/plain", picture(PIXELS), MALFORMED, "not valid utf-8"),
        (
            "single_BYTES",
            JSON,
            b'{"inputs": "caf\xe9"}',
            MALFORMED,
            "name its charset in Content-Type",
        ),
        ("vector_FP32", None, b"hello", UNSUPPORTED, "Content-Type is missing; send one of"),
        ("plain_FP32", None, b"", UNSUPPORTED, "Content-Type is missing"),
        ("single_BYTES", None, b"", UNSUPPORTED, "Content-Type is missing"),
        ("plain_FP32", "audio/wav", b"RIFF", UNSUPPORTED, "'audio/wav' is not supported here"),
        ("nhwc_free", "application/pdf", b"%PDF", UNSUPPORTED, "'application/pdf'"),
        ("person", CURL, b"AGE=41&JOB=clerk", UNSUPPORTED, "-F NAME=VALUE"),
        ("single_BYTES", CURL, b"AGE=41", UNSUPPORTED, "-F NAME=VALUE"),
        ("single_BYTES", None, b'{"inputs": "a",}', MALFORMED, "not valid JSON"),
        ("single_BYTES", "multipart/related; boundary=b", b"--b", UNSUPPORTED, "multipart/related"),
        ("single_BYTES", f"{JSON}; charset=utf-8", b'{"inputs": "\xe9"}', MALFORMED, "UTF-8"),
        ("single_BYTES", f"{JSON}; charset=utf-16", b'{"inputs": "a"}!', MALFORMED, "not valid"),
        ("single_BYTES", f"{JSON}; charset=klingon", b"{}", MALFORMED, "unknown charset"),
    ):
        with subtests.test(f"{model} {content_type} {body[:20]!r}"):
            assert_error(post(zoo, model, content_type, body), *error, words)


# Values whose language cannot write them otherwise.


@any_names
def test_fields_of_a_form_are_numbers_and_booleans(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for age, n, member, expected in (
        ("41.5", "7", "true", (41.5, 7, True)),
        (" 41 ", "-7.0", "false", (41, -7, False)),
        ("4.1e1", "9007199254740993", "True", (41, 9007199254740993, True)),
        ("NaN", "0", "FALSE", ("NaN", 0, False)),
        ("inf", "1", "true", ("Infinity", 1, True)),
        ("-Infinity", "1", "true", ("-Infinity", 1, True)),
    ):
        with subtests.test(f"{age} {n} {member}"):
            form = fields(zoo, ("AGE", age), ("JOB", "12"), ("N", n), ("MEMBER", member))
            assert zoo.outputs(zoo.post("person", files=form)) == dict(
                zip(("AGE", "JOB", "N", "MEMBER"), (expected[0], "12", *expected[1:]), strict=True)
            )
    vector = fields(zoo, ("X", '[1, 2.5, "NaN"]'))
    assert zoo.outputs(zoo.post("vector_FP32", files=vector)) == {"Y": [1, 2.5, "NaN"]}
    batch = fields(zoo, ("X", "1"), ("X", "2"))
    assert zoo.outputs(zoo.post("single_INT32", files=batch)) == {"Y": [1, 2]}
    assert zoo.outputs(post(zoo, "single_INT32", "text/plain", b"12")) == {"Y": 12}
    empty = fields(zoo, ("X", "[1, 2]"), ("FACTOR", ""), ("OFFSET", "0.5"))
    assert zoo.outputs(zoo.post("optional", files=empty)) == {"Y": [1.5, 2.5]}


def test_field_of_a_form_that_is_no_value_is_refused(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for model, text, words in (
        ("single_INT32", "twelve", "got the string 'twelve'"),
        ("single_INT32", "1.5", "1.5, which is not an integer"),
        ("single_INT32", "3000000000", "3000000000, which is outside"),
        ("single_INT32", "true", "the boolean 'True'"),
        ("single_INT32", "", "the string ''"),
        ("single_INT32", "NaN", "the string 'NaN'"),
        ("single_INT32", '{"a": 1}', "the string '{\"a\": 1}'"),
        ("plain_BOOL", "1", "the number '1'"),
        ("plain_BOOL", "yes", "the string 'yes'"),
        ("vector_FP32", "1,2", "the string '1,2'"),
        ("vector_FP32", "[1, [2]]", "ragged lists"),
        ("vector_FP32", "[null]", 'null; write "NaN"'),
    ):
        with subtests.test(f"{model} {text}"):
            response = zoo.post(model, files=fields(zoo, ("X", text)))
            assert_error(response, *MISMATCH, words)


@any_names
def test_null_for_an_optional_input_means_that_it_is_absent(zoo: Zoo) -> None:
    inputs = {"X": [1, 2], "FACTOR": None, "OFFSET": 0.5}
    expected = {"Y": [1.5, 2.5]}
    assert zoo.outputs(zoo.infer("optional", inputs)) == expected
    nothing = zoo.infer("optional", inputs, outputs=None, parameters=None, id=None)
    assert zoo.outputs(nothing) == expected
    unset = zoo.infer("optional", inputs, parameters={"top_k": None})
    assert zoo.outputs(unset) == expected
    rows = {"instances": [zoo.named({"X": [n, 2], "FACTOR": None}) for n in (1, 3)]}
    predicted = zoo.post("optional", ":predict", json=rows)
    assert predicted.json() == {"predictions": [[1, 2], [3, 2]]}
    rows["instances"][0] = zoo.named({"X": [1, 2], "FACTOR": 2})
    assert_error(zoo.post("optional", ":predict", json=rows), *MISMATCH, "got null")
    assert_error(zoo.infer("optional", {"X": None}), *MISMATCH, "got null")


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "BF16"])
def test_numbers_for_floats_are_rounded_and_names_are_values(zoo: Zoo, datatype: str) -> None:
    values: list[Any] = [20240701, 33554434, 16777217, 2049, 0.1, "NaN", "Infinity", "-Infinity"]
    if datatype == "FP16":
        values = values[3:]
    dtype = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}.get(datatype)
    response = zoo.outputs(zoo.infer(f"plain_{datatype}", [values]))["Y"][0]
    assert response[-3:] == values[-3:]
    if dtype is not None:
        assert (
            np.array(response[:-3], dtype).tolist() == np.array(values[:-3]).astype(dtype).tolist()
        )
    else:
        assert response[:-3] == [20185088, 33554432, 16777216, 2048, 0.100097656]


# Files as they are.


@any_names
def test_bytes_of_a_file_are_the_elements_of_an_input_of_bytes(
    zoo: Zoo, subtests: pytest.Subtests
) -> None:
    file = picture(PIXELS)
    other = b"\x80\0\xff"
    elements = list(file)
    signed = np.frombuffer(other, np.int8).tolist()
    image: dict[str, Any] = {"files": fields(zoo, ("X", ("a.png", file, "image/png")))}
    two: dict[str, Any] = {"files": fields(zoo, ("X", ("a", file)), ("X", ("b", file)))}
    different: dict[str, Any] = {"files": fields(zoo, ("X", ("a", file)), ("X", ("b", other)))}
    uri = f"data:image/png;base64,{b64(file)['b64']}"
    npy_file = {"content": npy(np.array([[1, 2]], np.uint8))}
    requests: tuple[tuple[str, Mapping[str, Any], Any], ...] = (
        ("file_UINT8", {"content": file, "headers": {"Content-Type": "image/png"}}, elements),
        ("file_UINT8", {"content": file}, elements),
        ("file_INT8", {"content": other, "headers": {"Content-Type": "audio/L16"}}, signed),
        ("plain_file_UINT8", {"content": file}, elements),
        ("file_of_4_UINT8", {"content": file[:4]}, elements[:4]),
        ("file_UINT8", image, elements),
        ("file_UINT8", {"json": {"inputs": b64(file)}}, elements),
        ("file_UINT8", {"json": {"inputs": uri}}, elements),
        ("file_UINT8", {"json": {"inputs": [b64(file), b64(file)]}}, [elements, elements]),
        ("file_UINT8", two, [elements, elements]),
        ("file_UINT8", npy_file, [[1, 2]]),
        ("plain_FP32", {"files": fields(zoo, ("X", ("a.npy", npy(ARRAY))))}, ARRAY.tolist()),
        ("file_UINT8", {"json": {"inputs": [1, 2]}}, [1, 2]),
    )
    for model, request, value in requests:
        with subtests.test(f"{model} {str(request)[:40]}"):
            assert zoo.outputs(zoo.post(model, **request)) == {"Y": value}
    # The files of different lengths are inferences of their own, whose results cannot be one array either.
    refused = zoo.post("file_UINT8", **different)
    assert_error(refused, *MISMATCH, "different shapes")


def test_files_of_different_lengths_are_one_inference_each(zoo: Zoo) -> None:
    lengths = [1, 300, 70_000]
    files = fields(zoo, *(("X", (str(length), bytes(length))) for length in lengths))
    assert zoo.outputs(zoo.post("file_lengths", files=files)) == {"Y": lengths}
    listed = [b64(bytes(length)) for length in lengths]
    assert zoo.outputs(zoo.infer("file_lengths", listed)) == {"Y": lengths}
    rows = zoo.post("file_lengths", ":predict", json={"instances": listed})
    assert rows.json() == {"predictions": lengths}
    most = [b64(bytes(number % 2 + 1)) for number in range(2049)]
    refused = zoo.infer("file_lengths", most)
    assert_error(refused, 413, "TOO_LARGE", "at most 2048 files of different lengths; got 2049")
    dry_run = zoo.post("file_lengths", "/infer?dry_run=true", files=files).json()["inputs"]
    assert [each["shape"] for each in dry_run] == [[1, length] for length in lengths]


# No guess where it can be wrong.


def test_picture_is_made_for_1_3_or_4_channels_only(zoo: Zoo, subtests: pytest.Subtests) -> None:
    for model in ("channels_5", "channels_5_last", "channels_2", "channels_any", "frames"):
        with subtests.test(model):
            response = post(zoo, model, "image/png", picture(PIXELS))
            assert_error(response, *MISMATCH, "not an image shape, which has 1, 3 or 4 channels")
    named = zoo.outputs(post(zoo, "nhwc_any", "image/png", picture(PIXELS)))
    assert named["Y"] == PIXELS.tolist()


SIXTEEN = np.array([[0, 1, 256], [32767, 40000, 65535]], np.uint16)


def colours_of_16_bits() -> bytes:
    """A PNG of 16 bits and three channels, which Pillow does not write."""
    rows = np.stack([SIXTEEN, SIXTEEN[::-1], 65535 - SIXTEEN], axis=-1).astype(">u2")
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", 3, 2, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_pixels_of_16_bits_stay_whole(zoo: Zoo, subtests: pytest.Subtests) -> None:
    grey = picture(SIXTEEN)
    colours = colours_of_16_bits()
    low = np.minimum(SIXTEEN, 32767)
    fractions = SIXTEEN.astype(np.float32) / np.float32(257)
    every = np.stack([SIXTEEN, SIXTEEN[::-1], 65535 - SIXTEEN], axis=-1)
    eight = np.array([[0, 0, 1], [127, 156, 255]])
    for model, image, expected in (
        ("grey_UINT16", grey, SIXTEEN),
        ("grey_INT32", grey, SIXTEEN),
        ("grey_INT16", picture(low), low),
        ("grey_FP32", grey, fractions),
        ("grey_unit", grey, fractions / np.float32(255)),
        ("grey_UINT8", grey, eight),
        ("colours_UINT16", colours, every),
        ("colours_UINT16", grey, np.stack([SIXTEEN] * 3, axis=-1)),
        ("grey_UINT16", picture(PIXELS[..., 0]), PIXELS[..., 0]),
    ):
        with subtests.test(model):
            found = zoo.outputs(post(zoo, model, "image/png", image))["Y"]
            assert np.array(found, expected.dtype).tolist() == expected.tolist()
    refused = post(zoo, "grey_INT16", "image/png", grey)
    assert_error(refused, *MISMATCH, "whose values 0..65535 do not fit; set gateway.scale")


def test_rows_are_joined_only_if_each_item_has_one(zoo: Zoo) -> None:
    whole = zoo.outputs(zoo.infer("boxes", [1, 2, 3, 4]))
    assert whole == {"Y": [0, 0, 1, 1, 2, 2, 3, 3]}
    split = zoo.infer("boxes", [1, 2, 3, 4, 5])
    assert_error(split, *MISMATCH, "items; send at most 4 items per request")  # of either part
    assert zoo.outputs(zoo.infer("unsplit", [1, 2, 3, 4])) == {"Y": [1, 2, 3, 4]}
    refused = zoo.infer("unsplit", [1, 2, 3, 4, 5])
    assert_error(refused, *MISMATCH, "gateway.split: false; send at most 4 items per request")
    rows = zoo.post("boxes", ":predict", json={"instances": [1, 2, 3, 4, 5]})
    assert_error(rows, *MISMATCH, "send at most 4 items per request")
    values = list(range(10))
    assert zoo.outputs(zoo.infer("single_INT32", values)) == {"Y": values}


# Messages that say what to send instead.


def test_error_says_what_to_send_instead(zoo: Zoo, subtests: pytest.Subtests) -> None:
    v2 = [{"name": "X", "shape": [1, 1], "datatype": "BYTES", "data": ["hi"]}]
    structured = npy(np.zeros(1, [("a", "u1"), ("b", "u1")]))
    two = fields(zoo, ("X", ("a", b"abc")), ("X", ("b", b"abcd")))
    token = b'{"inputs": [["\xc3\xa9", NaN]]}'
    for response, (status, code), words in (
        (zoo.infer("nhwc_free", b64(picture(PIXELS))["b64"]), MISMATCH, '{"b64": "BASE64"}'),
        (zoo.infer("single_BYTES", v2), MISMATCH, "send it to /v2/models/MODEL/infer"),
        (zoo.infer("person", [{"AGE": 1}, {"AGE": 2}]), MISMATCH, "by the name of the input"),
        (zoo.post("plain_FP32", content=structured), MALFORMED, "the fields 'a' and 'b'"),
        (zoo.infer("all_optional", {}), MISMATCH, "no inputs; send at least one of"),
        (zoo.infer("all_optional", {"A": None}), MISMATCH, "no inputs; send at least one of"),
        (
            zoo.post("plain_file_UINT8", files=two),
            MISMATCH,
            "no batch dimension; send one file per",
        ),
        (zoo.post("file_of_4_UINT8", content=b"abc"), MISMATCH, "an array of shape [3]"),
        (post(zoo, "file_UINT8", "text/plain", b"abc"), MISMATCH, '{"b64": "BASE64"}'),
        (zoo.infer("file_UINT8", "YWJj"), MISMATCH, '{"b64": "BASE64"}'),
        (zoo.infer("vector_FP32", b64(b"abcd")), MISMATCH, "send an array as application/x-npy"),
        (zoo.infer("file_UINT8", [b64(b"abc"), 1]), MISMATCH, "bytes"),
        (
            post(zoo, "plain_FP32", JSON, token),
            MALFORMED,
            '"NaN", "Infinity" and "-Infinity" in quotes',
        ),
    ):
        with subtests.test(words):
            assert_error(response, status, code, words)


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC file, as iPhones take"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0", "a HEIF file"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "an AVIF file"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "a video"),
        (b"GIF89a", "a GIF file"),
        (b"BM\x36\0\0\0", "a BMP file"),
        (b"II*\0\x08\0\0\0", "a TIFF file"),
        (b"MM\0*\0\0\0\x08", "a TIFF file"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 file"),
        (b"\xff\x0a\xfa", "a JPEG XL file"),
        (b"%PDF-1.7", "a PDF file"),
        (b"<svg xmlns=''/>", "an XML or HTML text, such as SVG"),
    ],
)
def test_file_that_is_not_decoded_is_named(zoo: Zoo, beginning: bytes, name: str) -> None:
    response = post(zoo, "nhwc_free", "application/octet-stream", beginning)
    assert_error(
        response, 422, "BAD_IMAGE", f"not a JPEG, PNG or WebP image, but {name}; convert it"
    )
