"""The workloads of `/v1`: what a client of the gateway, of a plain FastAPI application and of nginx sends."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from benchmarks.requests import Request, encode_form, encode_jpeg, encode_npy, encode_v2_infer

BATCH = 8
EVENTS = 100
JPEG_HEADERS = {"Content-Type": "image/jpeg"}
JSON_HEADERS = {"Content-Type": "application/json"}
STREAM_HEADERS = {**JSON_HEADERS, "Accept": "text/event-stream"}
TEXT_TITLE = "a text to a BYTES input"
JPEG_TITLE = "a JPEG of 640×480 to FP32 3×224×224"
NPY_TITLE = "a 3×224×224 FP32 array as .npy"
FORM_TITLE = f"a form of {BATCH} JPEGs to FP32 3×224×224"
STREAM_TITLE = f"a stream of {EVENTS} events"
TEXT = "The ship left the harbour at dawn. " * 4


@dataclass(frozen=True)
class Workload:
    """The same work for three servers; nginx gets the tensor that the other two must make."""

    title: str
    model: str
    request: Request
    plain_path: str
    plain_request: Request
    prepared_path: str
    prepared_request: Request


def build_workload(
    title: str, model: str, request: Request, plain_path: str, tensor: np.ndarray, datatype: str
) -> Workload:
    path = f"/v2/models/{model}/infer"
    prepared = encode_v2_infer(tensor, datatype)
    return Workload(title, model, request, plain_path, request, path, prepared)


def build_stream(model: str = "ticking", pause_s: float = 0.0) -> Workload:
    inputs = {"COUNT": [EVENTS], "SECONDS": [pause_s]}
    prepared = {"COUNT": EVENTS, "SECONDS": pause_s}
    plain = {"model": model, "count": EVENTS, "seconds": pause_s}
    return Workload(
        STREAM_TITLE,
        model,
        Request(json.dumps({"inputs": inputs}).encode(), STREAM_HEADERS),
        "/events",
        Request(json.dumps(plain).encode(), JSON_HEADERS),
        f"/v2/models/{model}/generate_stream",
        Request(json.dumps(prepared).encode(), JSON_HEADERS),
    )


def build_workloads() -> list[Workload]:
    jpegs = [encode_jpeg(seed) for seed in range(BATCH)]
    array = np.random.default_rng(0).random((3, 224, 224), np.float32)
    text = Request(TEXT.encode(), {"Content-Type": "text/plain"})
    jpeg = Request(jpegs[0], JPEG_HEADERS)
    photo = Request(encode_jpeg(width=1920, height=1080), JPEG_HEADERS)
    npy = Request(encode_npy(array), {"Content-Type": "application/x-npy"})
    form = encode_form("X", jpegs, "image/jpeg")
    texts, files = np.array([[TEXT.encode()]], object), np.array([[file] for file in jpegs], object)
    images = np.repeat(array[None], BATCH, axis=0)
    return [
        build_workload(TEXT_TITLE, "blob", text, "/blob", texts, "BYTES"),
        build_workload(
            "a JPEG of 640×480 to a BYTES input", "blob", jpeg, "/blob", files[:1], "BYTES"
        ),
        build_workload(JPEG_TITLE, "array", jpeg, "/image", array[None], "FP32"),
        build_workload(
            "a JPEG of 1920×1080 to FP32 3×224×224", "array", photo, "/image", array[None], "FP32"
        ),
        build_workload(NPY_TITLE, "array", npy, "/array", array[None], "FP32"),
        build_workload(
            f"a form of {BATCH} JPEGs to a BYTES input", "blob", form, "/blobs", files, "BYTES"
        ),
        build_workload(FORM_TITLE, "array", form, "/images", images, "FP32"),
        build_stream(),
    ]
