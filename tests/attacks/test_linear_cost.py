"""The cost of a client's input is proportional to its length: parsers and their worst inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.capabilities.grpc_api.infer_request import read_infer_request
from gateway.capabilities.jobs.batches import RowWriter
from gateway.errors import GatewayError
from gateway.headers import parse_accept, parse_header_parameters
from gateway.memory import MemoryBudget, MemoryCharge
from gateway.telemetry.metrics import MetricFactory
from gateway.tensors.images import ImageReader
from gateway.tensors.inputs import to_inputs
from gateway.tensors.json_body import decode_base64_text
from gateway.tensors.multipart import PartReader
from gateway.tensors.npy import read_npy, read_npz
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec, build_signature
from tests.support import hostile_files as hostile
from tests.support.linearity import Work, assert_linear

pytestmark = pytest.mark.long

SIZE = 48 << 10


def feed_form(body: bytes) -> None:
    PartReader(hostile.FORM_TYPE, 128).feed(body)


def feed_row_in_pieces(line: bytes) -> None:
    budget = MemoryBudget(1 << 20, MetricFactory(CollectorRegistry()).counter("shed", "Shed."))

    async def store_nothing(data: bytes) -> None:
        """No row is complete."""

    writer = RowWriter(store_nothing, 1, MemoryCharge(budget))

    async def feed() -> None:
        for start in range(0, len(line), 32):
            await writer.feed(line[start : start + 32])

    asyncio.run(feed())


def read_image(data: bytes) -> None:
    spec = ImageSpec(ChannelLayout.CHANNELS_LAST, "RGB", -1, -1)
    ImageReader(spec, PayloadLimits(), "X").read(data)


def read_archive(data: bytes) -> None:
    read_npz(data, 64 << 20, 128)


def convert_to(datatype: str, values: list[Any]) -> None:
    metadata = {"name": "X", "datatype": datatype, "shape": [-1]}
    model = build_signature({"name": "m", "inputs": [metadata]}, {})
    to_inputs(Payload({"X": [Part(values)]}), model, PayloadLimits())


FORM_START = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'
JPEG = hostile.jpeg()
PNG = hostile.png()
WEBP = b"RIFF\xff\xff\xff\0WEBPVP8X\n\0\0\0" + bytes(10)
# What parses an input that begins, repeats and ends like this. A parser of what clients send belongs here.
PARSERS: dict[str, tuple[Callable[[Any], object], Any, Any, Any]] = {
    "parameters: empty": (parse_header_parameters, "a", ";", ""),
    "parameters: unclosed quotes": (parse_header_parameters, "a;b", '="', ""),
    "parameters: escaped quotes": (parse_header_parameters, 'a;b="', '\\"', ""),
    "parameters: semicolons in quotes": (parse_header_parameters, 'a; b="', ";", '"'),
    "Accept": (parse_accept, "", ",", ""),
    "form: line ends": (feed_form, FORM_START, b"\r\n", b""),
    "form: almost delimiters": (feed_form, FORM_START, b"\r\n--bX", b""),
    "form: blanks": (feed_form, FORM_START + b"\r\n--b", b" ", b""),
    "form: headers": (feed_form, b"--b\r\n", b"X: y\r\n", b""),
    "batch: a row in pieces": (feed_row_in_pieces, b"", b"aaa", b""),
    "data: URI without a comma": (decode_base64_text, "data:", ";", ""),
    "data: URI with escapes": (decode_base64_text, "data:,", "%41", ""),
    "base64 with blanks": (decode_base64_text, "", "a ", ""),
    "JPEG: padding": (read_image, JPEG[:2], b"\xff", JPEG[2:]),
    "JPEG: segments": (read_image, JPEG[:2], b"\xff\xfe\0\2", JPEG[2:]),
    "JPEG: padded data": (read_image, JPEG[:-2], b"\xff" * 16 + b"\0", b""),
    "JPEG: scans": (read_image, JPEG[:-2], b"\xff\xda\0\2", b""),
    "PNG: chunks": (read_image, PNG[:33], hostile.chunk(b"abCd"), PNG[33:]),
    "PNG: data": (read_image, PNG[:33], hostile.chunk(b"IDAT"), b""),
    "WebP: chunks": (read_image, WEBP, b"abcd\0\0\0\0", b""),
    ".npy: a header": (read_npy, b"\x93NUMPY\2\0\xff\xff\xff\0", b" ", b""),
    ".npz: signatures": (read_archive, b"", b"PK\5\6", b""),
    "numbers": (partial(convert_to, "FP32"), [], [0.5], []),
    "texts": (partial(convert_to, "BYTES"), [], ["ab"], []),
    "lists in lists": (partial(convert_to, "INT32"), [], [[[1]]], []),
    "texts for numbers": (partial(convert_to, "FP32"), [], ["data:,"], [1]),
    "gRPC: empty inputs": (read_infer_request, b"", b"\x2a\0", b""),
    "gRPC: inputs in inputs": (read_infer_request, b"", b"\x2a\x08\x2a\x06\x2a\x04\x2a\x02\x2a\0", b""),
    "gRPC: parameters": (read_infer_request, b"", b"\x22\x05\x0a\x01a\x12\0", b""),
    "gRPC: unknown fields": (read_infer_request, b"", b"\x78\x01", b""),
}  # fmt: skip


@pytest.mark.fault("headers, texts, values and files that make a parser rescan its input")
@pytest.mark.parametrize("name", PARSERS)
def test_cost_of_a_parser_is_linear(name: str) -> None:
    parse, start, unit, end = PARSERS[name]

    def work_on(size: int) -> Work:
        data = start + unit * (size // len(unit)) + end

        def work() -> None:
            with suppress(GatewayError):
                parse(data)

        return work

    assert_linear(work_on, SIZE)
