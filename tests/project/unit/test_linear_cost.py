"""The cost of a client's input is proportional to its length: parsers and their worst inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

import pytest
from prometheus_client import CollectorRegistry

from gateway.capabilities.grpc_api.infer_request import read_infer_request
from gateway.capabilities.jobs.batches.rows import RowWriter
from gateway.capabilities.jobs.service import ArrivingBody
from gateway.errors import GatewayError
from gateway.headers import parse_accept, parse_content_type, parse_header_parameters
from gateway.memory import MemoryBudget, MemoryCharge
from gateway.telemetry.metrics import MetricFactory
from gateway.tensors.images import ImageReader
from gateway.tensors.inputs import read_payload, to_inputs
from gateway.tensors.json_body import decode_base64_text
from gateway.tensors.multipart import PartReader
from gateway.tensors.npy import read_npy, read_npz
from gateway.tensors.payload import Part, Payload, PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec, build_signature
from tests.support import hostile_files as hostile
from tests.support.linearity import cpu_s

pytestmark = pytest.mark.long

KIB = 1024
SIZES = (8 * KIB, 64 * KIB, 256 * KIB)
ROUNDS = 5
# From 64 to 256 KiB linear is 4; a quadratic cost is 16.
MOST = 12.0
# Below this a time says nothing.
LEAST_S = 0.0005
IMAGE_SPEC = ImageSpec(ChannelLayout.CHANNELS_LAST, "RGB", -1, -1)


class Parser(NamedTuple):
    """A parser, the input of about so many bytes that costs it most, and how it is called."""

    name: str
    build: Callable[[int], Any]
    run: Callable[[Any], object]


def repeated(unit: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda size: before + unit * (size // len(unit)) + after


def repeated_bytes(unit: bytes, before: bytes = b"", after: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: before + unit * (size // len(unit)) + after


def repeated_value(value: Any) -> Callable[[int], list[Any]]:
    return lambda size: [value] * (size // 8)


def feed_form(body: bytes) -> list[Any]:
    return list(PartReader("multipart/form-data; boundary=b", 128).feed(body))


def feed_row_in_pieces(line: bytes) -> None:
    budget = MemoryBudget(1 << 20, MetricFactory(CollectorRegistry()).counter("shed", "Shed."))
    # No row is complete, and so none is stored.
    writer = RowWriter(cast(ArrivingBody, None), 1, MemoryCharge(budget))

    async def feed() -> None:
        for start in range(0, len(line), 32):
            await writer.feed(line[start : start + 32])

    asyncio.run(feed())


def read_image(data: bytes) -> object:
    return ImageReader(IMAGE_SPEC, PayloadLimits(), "X").read(data)


def read_text(charset: str) -> Callable[[bytes], object]:
    return lambda body: read_payload(body, f"text/plain; charset={charset}", PayloadLimits())


def webp(content: bytes) -> bytes:
    return b"RIFF" + (len(content) + 4).to_bytes(4, "little") + b"WEBP" + content


def webp_of_chunks(size: int) -> bytes:
    return webp(b"VP8X\n\0\0\0" + bytes(10) + b"abcd\0\0\0\0" * (size // 8))


def archive_of_files(size: int) -> bytes:
    return hostile.archive((f"{number}", b"") for number in range(size // 100))


def read_archive(body: bytes) -> object:
    return read_npz(body, 64 << 20, 128)


def convert_to(datatype: str) -> Callable[[list[Any]], object]:
    """The conversion of a value for an input of any length."""
    metadata = {"name": "X", "datatype": datatype, "shape": [-1]}
    model = build_signature({"name": "m", "inputs": [metadata]}, {})
    return lambda value: to_inputs(Payload({"X": [Part(value)]}), model, PayloadLimits())


FORM_START = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'
JPEG = hostile.jpeg()
JPEG_DATA = JPEG[:-2]
PNG = hostile.png()

# A parser or regular expression of what clients or replicas send belongs here.
PARSERS = (
    Parser("Content-Type", repeated(";", 'text/plain; a="'), parse_content_type),
    Parser("parameters: escaped quotes", repeated('\\"', 'a;b="'), parse_header_parameters),
    Parser("parameters: semicolons in quotes", repeated(";", 'a; b="', '"'), parse_header_parameters),
    Parser("parameters: many", repeated(';a="\\""'), parse_header_parameters),
    Parser("Accept", repeated(","), parse_accept),
    Parser("multipart: line ends", repeated_bytes(b"\r\n", FORM_START), feed_form),
    Parser("multipart: almost delimiters", repeated_bytes(b"\r\n--bX", FORM_START), feed_form),
    Parser("multipart: blanks", repeated_bytes(b" ", FORM_START + b"\r\n--b"), feed_form),
    Parser("multipart: preamble", repeated_bytes(b"\r\n--"), feed_form),
    Parser("batch: a row in pieces", lambda size: b"a" * (3 * size), feed_row_in_pieces),
    Parser("data: URI without a comma", repeated(";", "data:"), decode_base64_text),
    Parser("data: URI with escapes", repeated("%41", "data:,"), decode_base64_text),
    Parser("base64", repeated("abcd"), decode_base64_text),
    Parser("base64 with blanks", repeated("a "), decode_base64_text),
    Parser("JPEG: padding", repeated_bytes(b"\xff", JPEG[:2], JPEG[2:]), read_image),
    Parser("JPEG: segments", repeated_bytes(b"\xff\xfe\0\2", JPEG[:2], JPEG[2:]), read_image),
    Parser("JPEG: padded data", repeated_bytes(b"\xff" * 16 + b"\0", JPEG_DATA), read_image),
    Parser("PNG: chunks", lambda size: hostile.png_of_chunks(size // 12), read_image),
    Parser(
        "WebP: chunks",
        webp_of_chunks,
        read_image,
    ),
    Parser(".npy: a header", lambda size: hostile.npy_of(" " * size + "(1,)", version=2), read_npy),
    Parser(".npz: signatures", repeated_bytes(b"PK\5\6"), read_archive),
    Parser(".npz: entries", archive_of_files, read_archive),
    *(
        Parser(f"values: {datatype}", repeated_value(value), convert_to(datatype))
        for datatype, value in {"FP32": 0.5, "INT64": 1.0, "BYTES": "ab", "BOOL": True}.items()
    ),
    Parser("values: lists in lists", repeated_value([[1]]), convert_to("INT32")),
    Parser("values: texts for numbers", lambda size: ["data:,"] * (size // 8) + [1], convert_to("FP32")),
    *(
        Parser(f"gRPC: {name}", repeated_bytes(unit), read_infer_request)
        for name, unit in {
            "empty inputs": b"\x2a\0",
            "empty tensors": b"\x3a\0",
            "inputs in inputs": b"\x2a\x08\x2a\x06\x2a\x04\x2a\x02\x2a\0",
            "parameters": b"\x22\x05\x0a\x01a\x12\0",
            "versions": b"\x12\x011",
            "unknown fields": b"\x78\x01",
        }.items()
    ),
    *(
        Parser(f"text: {charset}", repeated_bytes(unit), read_text(charset))
        for charset, unit in {
            "utf-8": "汉".encode(),
            "gb18030": "한".encode("gb18030"),
            "shift_jis": "日".encode("shift_jis"),
            "utf-16": b"\0\xd8\0\xdc",
        }.items()
    ),
)  # fmt: skip


def cost_s(parser: Parser, data: Any, enough_s: float = 0.0) -> float:
    """The CPU time of a call, which may refuse the data."""

    def work() -> None:
        with suppress(GatewayError):
            parser.run(data)

    return cpu_s(work, ROUNDS, enough_s)


@pytest.mark.fault("headers, texts, values and files that make a parser rescan its input")
@pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
def test_cost_of_a_parser_is_linear(parser: Parser) -> None:
    costs = [cost_s(parser, parser.build(size)) for size in SIZES[:2]]
    most_s = MOST * max(costs[1], LEAST_S)
    costs.append(cost_s(parser, parser.build(SIZES[2]), enough_s=most_s / 2))
    shown = ", ".join(
        f"{size // KIB} KiB {cost * 1e6:.0f} µs" for size, cost in zip(SIZES, costs, strict=True)
    )
    assert costs[2] <= most_s, shown
