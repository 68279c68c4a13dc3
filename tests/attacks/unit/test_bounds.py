"""Bounds of what a request may become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.capabilities.openai.text_vectors import (
    MAX_TEXTS,
    build_embedding_payloads,
    parse_embeddings_request,
    parse_rerank_request,
)
from gateway.capabilities.tf_serving.bodies import parse_predict_body
from gateway.errors import TooLarge
from gateway.media_types import JSON
from gateway.tensors.images import CostlyImages
from gateway.tensors.inputs import InferInputs, check_row_count, to_inputs
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import Signature, build_signature
from tests.support.hostile_files import jpeg_of_scans, png
from tests.support.images import encoded


def convert(value: Any, datatype: str, shape: list[int], **limits: int) -> InferInputs:
    tensor = {"name": "X", "datatype": datatype, "shape": shape}
    model = build_signature({"name": "m", "inputs": [tensor]}, {})
    return to_inputs(Payload({"X": [Part(value, JSON)]}), model, PayloadLimits(**limits))


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_images_of_a_request_and_their_pixels_are_limited() -> None:
    for shape, most in (([-1, 8, 8, 3], 10 * 64), ([-1, -1, -1, 3], 10 * 256)):
        assert len(convert([png()] * 10, "FP32", shape, max_image_pixels=most).arrays["X"]) == 10
        with pytest.raises(TooLarge, match="the 11 images for input 'X' decode to"):
            convert([png()] * 11, "FP32", shape, max_image_pixels=most)
    for images in ([png()] * 3, [jpeg_of_scans(64)]):  # the scans of a JPEG count as well
        with pytest.raises(CostlyImages):
            convert(images, "FP32", [-1, 8, 8, 3], max_cost_pixels=2 * 256)
    with pytest.raises(TooLarge, match="accepts at most 4096 files per request; got 4097"):
        convert([png(1, 1)] * 4097, "FP32", [-1, 1, 1, 3])
    with pytest.raises(TooLarge, match="accepts at most 4096 files per request; got 4097"):
        convert([b"a"] * 4097, "UINT8", [-1, -1])
    grey_of_16_bits = encoded(np.zeros((16, 16), np.uint16))
    for datatype, cost in (("UINT8", 256), ("UINT16", 4 * 256)):
        convert([grey_of_16_bits], datatype, [-1, -1, -1, 1], max_cost_pixels=cost)
        with pytest.raises(CostlyImages):
            convert([grey_of_16_bits], datatype, [-1, -1, -1, 1], max_cost_pixels=cost - 1)


def text_model(dims: list[int], max_batch_size: int) -> Signature:
    shape = [-1, *dims] if max_batch_size else dims
    text = {"name": "X", "datatype": "BYTES", "shape": shape}
    vector = {"name": "Y", "datatype": "FP32", "shape": shape}
    metadata = {"name": "m", "inputs": [text], "outputs": [vector]}
    return build_signature(metadata, {"max_batch_size": max_batch_size})


@pytest.mark.parametrize(
    ("dims", "max_batch_size", "most", "words"),
    [
        ([1], 0, 5, "no batch dimension, so a request can have at most 5 items; got 6"),
        ([1], 8, 40, "a batch of 41 items .* accepts 8 at a time; send at most 40 items"),
        ([-1, 1], 0, 0, ""),
    ],
)
def test_inferences_are_limited_before_rows_are_read(
    dims: list[int], max_batch_size: int, most: int, words: str
) -> None:
    model = text_model(dims, max_batch_size)
    limits = PayloadLimits(max_inferences=5)
    assert model.count_inferences(most) == (5 if words else 1)
    check_row_count(model, most, limits)
    rows = ["a"] * (most or 100)

    def embed(texts: list[str]) -> object:
        request = parse_embeddings_request(orjson.dumps({"model": "m", "input": texts}))
        return build_embedding_payloads(model, request, limits)

    assert parse_predict_body(orjson.dumps({"instances": rows}), model, limits)
    assert embed(rows)
    if not words:
        return
    invalid = orjson.dumps({"instances": [*rows, {"b64": "?"}]})
    with pytest.raises(TooLarge, match=words):
        parse_predict_body(invalid, model, limits)
    with pytest.raises(TooLarge, match=words):
        embed([*rows, "a"])


@pytest.mark.parametrize(
    ("parse", "key"),
    [(parse_embeddings_request, "input"), (parse_rerank_request, "documents")],
)
def test_texts_are_counted_before_they_are_read(parse: Callable[[bytes], object], key: str) -> None:
    document = {"model": "m", "query": "a", key: ["a"] * MAX_TEXTS + [None]}
    with pytest.raises(TooLarge, match=f"at most {MAX_TEXTS} texts; got {MAX_TEXTS + 1}"):
        parse(orjson.dumps(document))
