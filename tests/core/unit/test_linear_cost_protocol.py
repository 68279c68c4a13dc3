"""The cost of reading bytes of a client or a replica is proportional to their number, whatever they are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import orjson
import pytest

from gateway import callers, messages
from gateway.access import auth
from gateway.capacity.body_chunks import ZLIB_WBITS, coalesce_chunks, inflate_chunks
from gateway.embedded.log_filter import LogFilter
from gateway.errors import GatewayError
from gateway.fleet.index import parse_index
from gateway.http_client.client import CompleteResponse
from gateway.messages import escape_unprintable
from gateway.repository import resolver
from gateway.repository.load_parameters import FILE_PARAMETER
from gateway.routes.metrics import accepts_gzip, parse_scrape_timeout
from gateway.routes.passthrough import body as request_body
from gateway.routes.passthrough import headers as request_headers
from gateway.routes.passthrough.body import find_sequence_step
from gateway.routes.passthrough.rules import match_route
from gateway.routes.passthrough.sse import EventStreamScrubber
from gateway.server.protocol.parser import VALID_HOST
from gateway.telemetry import tracing
from gateway.telemetry.exposition import encode_page, parse_families
from gateway.triton import error_mapping
from gateway.triton.grpc import management
from gateway.triton.grpc.byte_channel import map_grpc_error
from gateway.triton.inference import parse_http_response
from gateway.triton.json_guard import JsonGuard
from gateway.triton.request_target import RequestTarget
from tests.support.linearity import cpu_s

pytestmark = pytest.mark.long

SIZES = (1 << 10, 8 << 10, 64 << 10, 256 << 10)
ROUNDS = 4
SLACK = 3.0
NOISE_S = 2e-3
REFUSALS = (GatewayError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Parser(NamedTuple):
    """A name, what reads the bytes, and a worst input of about that many bytes."""

    name: str
    parse: Callable[[Any], object]
    worst: Callable[[int], Any]


def of(
    unit: bytes | str, before: bytes | str = b"", after: bytes | str = b""
) -> Callable[[int], Any]:
    """Repeat the unit; bytes throughout, or text throughout."""
    if isinstance(unit, str):
        start, end = str(before or ""), str(after or "")
        return lambda size: start + unit * (size // len(unit)) + end
    first, last = bytes(before), bytes(after)  # type: ignore[arg-type]
    return lambda size: first + unit * (size // len(unit)) + last


def page(text: str) -> None:
    parse_families(text.split("\n"), "a:8000")


def rewritten(text: str) -> None:
    for _ in encode_page(parse_families(text.split("\n"), "a:8000")):
        pass


def header(name: bytes) -> Callable[[bytes], object]:
    return lambda value: request_headers.prepare_request_headers(
        {"headers": [(b"host", b"a"), (name, value)]}
    )


def events(data: bytes) -> None:
    scrubber = EventStreamScrubber(error_mapping.sanitize_event)
    for start in range(0, len(data), 1 << 20):
        scrubber.feed(data[start : start + (1 << 20)])
    scrubber.end()


def dripped_events(data: bytes) -> None:
    scrubber = EventStreamScrubber(lambda _: b"{}")
    for start in range(0, len(data), 64):
        scrubber.feed(data[start : start + 64])
    scrubber.end()


def map_error(body: bytes) -> object:
    return error_mapping.map_triton_error(400, body, RequestTarget("m"))


def error_body(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def error_bodies(unit: str, before: str = "") -> Callable[[int], bytes]:
    return lambda size: error_body(of(unit, before)(size))


def screening(data: bytes) -> None:
    found = JsonGuard(1 << 30)
    for start in range(0, len(data), 1 << 14):
        found.feed(data[start : start + (1 << 14)])
    found.finish()


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def inflated(data: bytes) -> None:
    async def run() -> None:
        async for _ in inflate_chunks(pieces(data, len(data)), ZLIB_WBITS["gzip"]):
            pass

    asyncio.run(run())


def grouped(data: bytes) -> None:
    async def run() -> None:
        async for _ in coalesce_chunks(pieces(data, 6), request_body.MIN_CHUNK_BYTES):
            pass

    asyncio.run(run())


def read_answer(body: bytes) -> object:
    return parse_http_response(
        CompleteResponse(200, [(b"inference-header-content-length", b"%d" % len(body))], body)
    )


def outputs(size: int) -> bytes:
    empty = {"datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
    entries = [
        {"name": f"Y{number}", **empty} for number in range(size // len(orjson.dumps(empty)))
    ]
    return orjson.dumps({"outputs": entries})


def index(size: int) -> list[Any]:
    return [
        {"name": f"m{number % 9}", "version": str(number), "state": "READY", "reason": ""}
        for number in range(size // 60)
    ]


def translated(text: str) -> object:
    return map_grpc_error("UNAVAILABLE", text, RequestTarget(), 1)


def step_in(body: bytes) -> object:
    return find_sequence_step(body, None)


def globs(name: str) -> bool:
    return callers.Caller("a", models=("*a*b*c*", "*a*a*a*z", "[ab]*[cd]*[ef]*")).can_see(name)


PARSERS = (
    Parser("a page of one long number", page, of("1", "a ", "x\n")),
    Parser("… before a point", page, of("1", "a 1.", "x\n")),
    Parser("… of labels", page, of('b="c",', "a{", "} 1\n")),
    Parser("… of labels that do not end", page, of('b="', "a{", "} 1\n")),
    Parser("… of escaped quotes", page, of('\\"', 'a{b="', "} 1\n")),
    Parser("… of spaces", page, of(" ", "a", "x\n")),
    Parser("… of names", page, of("a", "", "\n")),
    Parser("… of braces", page, of("{}", "a", "\n")),
    Parser("… of a comment", page, of(" \t", "# HELP", "\n")),
    Parser("… of samples", rewritten, of('a{b="c"} 1\n')),
    Parser("… of families", rewritten, lambda size: "".join(f"a{n} 1\n" for n in range(size // 9))),
    Parser("… of buckets", rewritten, of('a_bucket{le="1"} 1\n', "# TYPE a histogram\n")),
    Parser("… of the label replica", page, of('replica="c",', "a{", "} 1\n")),
    Parser("events", events, of(b"data: 1\n\n")),
    Parser("events of errors", events, of(b'data: {"error":"a"}\n\n')),
    Parser("an error that does not end", dripped_events, of(b"\n.", b'data: {"error":"')),
    Parser("ends of events", dripped_events, of(b"\n\n")),
    Parser("halves of ends of events", dripped_events, of(b"\n.")),
    Parser("an error of folders", map_error, error_bodies("/a")),
    Parser("… of words that wrap", map_error, error_bodies("Internal: ")),
    Parser("… of quotes", map_error, error_bodies("model '")),
    Parser("… of lines", map_error, error_bodies("\n At:")),
    Parser("… of no JSON", map_error, of(b'{"error":')),
    Parser("… of brackets", map_error, of(b"[")),
    Parser("an error in a stream", error_mapping.sanitize_event, error_bodies("in ensemble 'a', ")),
    Parser("gRPC's words", translated, of("fail")),
    Parser("gRPC's words of a load", management.UNREACHABLE_MESSAGE.search, of("connection ")),
    Parser("a log line", LogFilter().filter_line, of("tritonserver", "E0101 00:00:00.0 1 a.cc:1] ")),
    Parser("… of no blank", LogFilter().filter_line, of("tritonserver:")),
    Parser("… of a load", LogFilter().filter_line, of("a' ", "E0101 00:00:00.0 1 a.cc:1] failed to load '")),
    Parser("… of a date", LogFilter().filter_line, of("1:", "I0101 ")),
    Parser("a log line", escape_unprintable, of("\x1b\n")),
    Parser("a quotation", messages.quote_text, of("\0")),
    Parser("Accept-Encoding of commas", header(b"accept-encoding"), of(b"gzip;q=1,")),
    Parser("… of semicolons", header(b"accept-encoding"), of(b";")),
    Parser("… of a weight", header(b"accept-encoding"), of(b"0", b"gzip;q=0.")),
    Parser("Content-Type", header(b"content-type"), of(b"urlencode")),
    Parser("Connection", header(b"connection"), of(b"a,")),
    Parser("Content-Encoding", header(b"content-encoding"), of(b" gzip")),
    Parser("Inference-Header-Content-Length", header(b"inference-header-content-length"), of(b"9")),
    Parser("X-Sequence", header(b"x-sequence"), of(b"start,")),
    Parser("X-Sequence-ID", header(b"x-sequence-id"), of(b"9")),
    Parser("a name of a model", messages.is_model_name, of("%25")),
    Parser("… of escapes", messages.is_model_name, of("%e2%")),
    Parser("… that is plain", callers.is_path_safe, of("é")),
    Parser("… against patterns", globs, of("a")),
    Parser("… against other patterns", globs, of("abc")),
    Parser("a version", messages.normalize_version, of("0")),
    Parser("… as Triton reads it", resolver.parse_triton_version, of("0")),
    Parser("… of spaces", resolver.parse_triton_version, of(" ")),
    Parser("a key", lambda value: auth.extract_key([(b"authorization", value)]), of(b" ", b"Bearer")),
    Parser(
        "… as a password", lambda value: auth.extract_key([(b"authorization", value)]),
        of(b"OjpB", b"Basic "),
    ),
    Parser("an origin", lambda text: auth.is_loopback(auth.parse_host(text)), of(":", "http://[")),
    Parser("… of dots", lambda text: auth.is_loopback(auth.parse_host(text)), of("1.", "http://")),
    Parser("… of names", auth.parse_host, of("@[", "http://")),
    Parser("X-Request-ID", lambda value: tracing.find_request_id([(b"x-request-id", value)]), of(b"a")),
    Parser("Host", VALID_HOST.fullmatch, of(b"a:", b"")),
    Parser("… of spaces", VALID_HOST.fullmatch, of(b" ", b"a:1", b"x")),
    Parser("… of digits", VALID_HOST.fullmatch, of(b"1", b"a:", b"x")),
    Parser("a path of names", lambda path: match_route(path, "GET"), of("/models", "/v2")),
    Parser("… of versions", lambda path: match_route(path, "GET"), of("/versions", "/v2/models/a")),
    Parser("… of regions", lambda path: match_route(path, "GET"), of("/", "/v2/systemsharedmemory")),
    Parser("an Accept-Encoding of commas", accepts_gzip, of("br,")),
    Parser("… of parameters", accepts_gzip, of(";a=b", "br")),
    Parser("a time of digits", parse_scrape_timeout, of("1")),
    Parser("a file of a load", FILE_PARAMETER.fullmatch, of("a/", "file:")),
    Parser("… of dots", FILE_PARAMETER.fullmatch, of("./", "file:a/")),
    Parser("a wish for classes", request_body.find_class_outputs, of(b"[")),
    Parser("… of many keys", request_body.find_class_outputs, of(b'"a":1,', b'{"outputs":{', b'"b":1}}')),
    Parser("… of a long number", request_body.find_class_outputs, of(b"9", b'{"outputs":', b"}")),
    Parser("a step of a sequence", step_in, of(b"[1],", b'{"sequence_id":[', b"1]}")),
    Parser("… of a long number", step_in, of(b"9", b'{"sequence_id":', b"}")),
    Parser("JSON of shapes", screening, of(b'"shape":[', b'"')),
    Parser("… of short shapes", screening, of(b'"shape":[1],')),
    Parser("… of shapes without colons", screening, of(b'"shape" ')),
    Parser("… of half shapes", screening, of(b'"shape":["x",')),
    Parser("… of quotes", screening, of(b'"')),
    Parser("… of backslashes", screening, of(b"\\")),
    Parser("… of spaces behind a word", screening, of(b" ", b'"shape"')),
    Parser("… of levels", screening, of(b"[]{}")),
    Parser("gzip of many members", inflated, of(gzip.compress(b"", mtime=0))),
    Parser("gzip of one member", inflated, lambda size: gzip.compress(bytes(size * 50))),
    Parser("a body of small pieces", grouped, of(b"abcdef")),
    Parser("an answer of many outputs", read_answer, outputs),
    Parser("an answer of levels", read_answer, of(b"[")),
    Parser("an index", parse_index, index),
)  # fmt: skip


def least_seconds(parser: Parser, size: int, enough_s: float) -> float:
    """The CPU time of the round that was disturbed least."""
    worst = parser.worst(size)

    def parse() -> None:
        with contextlib.suppress(*REFUSALS):
            parser.parse(worst)

    return cpu_s(parse, ROUNDS, enough_s)


@pytest.mark.fault("250 KiB made to be expensive to inspect")
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_cost_of_a_parser_grows_with_its_bytes(parser: Parser) -> None:
    """Eight times the bytes never cost much more than eight times as much."""
    seconds: list[float] = []
    for size, before in zip(SIZES, (0, *SIZES), strict=False):
        most_s = SLACK * size / before * seconds[-1] + NOISE_S if before else 0.0
        seconds.append(least_seconds(parser, size, most_s / 2 if size == SIZES[-1] else 0.0))
    for number in range(len(SIZES) - 1):
        ratio = SIZES[number + 1] / SIZES[number]
        assert seconds[number + 1] < SLACK * ratio * seconds[number] + NOISE_S
