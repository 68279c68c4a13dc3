"""The requests that the benchmarks send."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput

BOUNDARY = "0123456789abcdef"


@dataclass(frozen=True)
class Request:
    """The body and headers of a POST request."""

    body: bytes
    headers: dict[str, str]


def encode_v2_infer(array: np.ndarray, datatype: str) -> Request:
    """Return the request as Triton's own client sends it."""
    tensor = InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)
    body, length = InferenceServerClient.generate_request_body([tensor])
    return Request(body, {"Inference-Header-Content-Length": str(length)})


def encode_jpeg(seed: int = 0, width: int = 640, height: int = 480) -> bytes:
    """Return a JPEG of noise, which is larger and slower to decode than a photo."""
    file = io.BytesIO()
    noise = np.random.default_rng(seed).normal(128, 20, (height, width, 3)).clip(0, 255)
    Image.fromarray(noise.astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def encode_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def encode_form(field: str, files: list[bytes], media_type: str) -> Request:
    """Return an upload of several files in one form."""
    delimiter = f"--{BOUNDARY}\r\n".encode()
    parts = [
        f'Content-Disposition: form-data; name="{field}"; filename="{number}"\r\n'
        f"Content-Type: {media_type}\r\n\r\n".encode()
        + file
        + b"\r\n"
        for number, file in enumerate(files)
    ]
    body = delimiter + delimiter.join(parts) + f"--{BOUNDARY}--\r\n".encode()
    return Request(body, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
