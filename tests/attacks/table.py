"""Requests, calls, uploads and files that cost far more than they say, and what each may cost at most.

Each body, call, upload and watched file that the gateway reads needs a row:
`tests/attacks/unit/test_table.py` compares the table with the routes and codecs.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
import yaml
from PIL import Image
from tritonclient.grpc import service_pb2

from tests.attacks.corpus import FORM, IMAGES, encode_form
from tests.capabilities.grpc_api.support.grpc_gateway import INFER, SERVICE, STREAM
from tests.capabilities.grpc_api.support.http2 import (
    CANCEL,
    DATA,
    RST_STREAM,
    Http2Connection,
    encode_frame,
    encode_message,
)
from tests.capabilities.uploads.support.uploads import FIRST
from tests.support import hostile_files as hostile
from tests.support import keys
from tests.support.images import encoded
from tests.support.load import Pool, get, post
from tests.support.model_zoo.zoo import TEXT_MODELS, identity, image
from tests.support.wait import TIMEOUT_S, wait_until_async

KIB = 1 << 10
MIB = 1 << 20
JPEG = "image/jpeg"
PNG = "image/png"
WEBP = "image/webp"
JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
TEXT = "text/plain"
BYTES = "application/octet-stream"
NDJSON = "application/x-ndjson"
GZIP = "Content-Encoding: gzip"
DEFLATE = "Content-Encoding: deflate"
# Loaded on demand: those that are asked for, and one of another caller.
KEPT = identity("kept", "FP32", (-1,))
ON_DEMAND = [identity(f"asked{number:02}", "FP32", (-1,)) for number in range(8)]
# What is attacked, by the names in the table. `echo` belongs to others.
MODELS = (
    image("images", (3, 32, 32)),
    image("free_images", (-1, -1, 3), datatype="UINT8"),
    identity("numbers", "FP32", (-1, -1), 8),
    identity("texts", "BYTES", (1,), 8),
    identity("single", "BYTES", (1,)),
    identity("free_texts", "BYTES", (-1, -1)),
    identity("integers", "INT64", (-1, -1)),
    identity("echo", "FP32", (-1,)),
    *(model for model in TEXT_MODELS if model.name in ("vectors", "plain_vectors", "relevance")),
)
# A silent call or an unread stream ends by itself.
HOLD_S = 3.0
POLL_S = 0.1
# The number in the name of the next upload: all of them are different models.
UPLOADED = count()


@dataclass(frozen=True)
class Site:
    """The gateway that is attacked, and files that it watches, by their labels."""

    port: int
    grpc_address: str
    files: Mapping[str, Path]


@dataclass
class Attacker:
    """A caller with keys of its own, on one event loop."""

    site: Site
    pool: Pool
    # Two changes of a file would undo each other; of calls that are held, the table says the number.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Request(Protocol):
    async def send(self, attacker: Attacker) -> str:
        """Return the status, or the name of the gRPC code."""


class Attack(NamedTuple):
    """Requests that are sent one after the other, and what all of them together may cost.

    `cpu_s` and `memory_mib` are those of the gateway's processes.
    """

    requests: tuple[Request, ...]
    outcomes: frozenset[str]
    cpu_s: float
    memory_mib: float
    livez_ms: float = 250
    infer_ms: float = 500


@dataclass(frozen=True)
class HttpRequest:
    path: str
    content_type: str
    make_body: Callable[[], bytes]
    headers: tuple[str, ...] = ()
    method: str = "POST"
    key: str = keys.INFER

    @property
    def wire(self) -> bytes:
        headers = (f"X-Api-Key: {self.key}", *self.headers)
        wire = post(self.path, self.make_body(), self.content_type, *headers)
        return self.method.encode() + wire.removeprefix(b"POST")

    async def send(self, attacker: Attacker) -> str:
        return str((await attacker.pool.ask(self.wire)).status)


@dataclass(frozen=True)
class Upload:
    """A model file of this kind, or the config of one, that an administrator uploads."""

    kind: str
    make_file: Callable[[], bytes]

    async def send(self, attacker: Attacker) -> str:
        """Remove the model again if it was accepted."""
        path = f"/v1/models/upload-{os.getpid()}-{next(UPLOADED)}"
        if self.kind == "config":
            fields = ("model", BYTES, FIRST), ("config", BYTES, self.make_file())
            content_type = FORM
            body = encode_form(*fields)
        else:
            content_type = BYTES
            body = self.make_file()
        put = HttpRequest(path, content_type, lambda: body, method="PUT", key=keys.ADMIN)
        status = await put.send(attacker)
        if status == "201":
            delete = HttpRequest(path, BYTES, bytes, method="DELETE", key=keys.ADMIN)
            # Beside other attacks, it may be refused for a while.
            while (removed := await delete.send(attacker)) in ("409", "429", "503"):  # noqa: ASYNC110 - nothing sets an event
                await asyncio.sleep(POLL_S)
            assert removed == "200"
        return status


@dataclass(frozen=True)
class FileChange:
    """Another content of a watched file, until the gateway has noticed it."""

    label: str
    write: Callable[[Path], None]
    key: str = ""  # of the new content; without one, it is rejected

    async def send(self, attacker: Attacker) -> str:
        file = attacker.site.files[self.label]
        async with attacker.turn:
            before = file.read_bytes()
            fresh = file.with_suffix(".attack")
            self.write(fresh)
            fresh.replace(file)
            try:
                await wait_until_async(partial(self._is_noticed, attacker), interval_s=POLL_S)
            finally:
                fresh.write_bytes(before)
                fresh.replace(file)
            await wait_until_async(partial(self._is_restored, attacker), interval_s=POLL_S)
        return "accepted" if self.key else "rejected"

    async def _is_noticed(self, attacker: Attacker) -> bool:
        if not self.key:
            return await self._read_valid(attacker) == "0.0"
        return await self._is_key_valid(attacker)

    async def _is_restored(self, attacker: Attacker) -> bool:
        if not self.key:
            return await self._read_valid(attacker) == "1.0"
        return not await self._is_key_valid(attacker)

    async def _is_key_valid(self, attacker: Attacker) -> bool:
        answer = await attacker.pool.ask(with_key(get("/v2"), self.key))
        return answer.status != 401

    async def _read_valid(self, attacker: Attacker) -> str:
        page = await attacker.pool.ask(with_key(get("/metrics"), keys.METRICS))
        line = f'gateway_file_valid{{file="{self.label}"}} '
        return page.body.decode().partition(line)[2].partition("\n")[0]


def with_key(wire: bytes, key: str) -> bytes:
    return wire.replace(b"\r\n", f"\r\nX-Api-Key: {key}\r\n".encode(), 1)


CREDENTIALS = (("x-api-key", keys.ADMIN),)


def grpc_channel(address: str) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


@dataclass(frozen=True)
class GrpcCall:
    """A call with one message; the code of its status."""

    method: str
    make_message: Callable[[], bytes]
    metadata: tuple[tuple[str, str], ...] = ()

    async def send(self, attacker: Attacker) -> str:
        return await asyncio.to_thread(self._call, attacker.site.grpc_address)

    def _call(self, address: str) -> str:
        with grpc_channel(address) as channel:
            # As every method accepts one message.
            responses = channel.stream_stream(self.method)(
                iter([self.make_message()]),
                timeout=TIMEOUT_S,
                metadata=(*CREDENTIALS, *self.metadata),
            )
            with suppress(grpc.RpcError):
                list(responses)
            return str(responses.code().name)


@dataclass(frozen=True)
class HeldCalls:
    """Calls that send these messages, and neither end nor read; the code of the last one after `HOLD_S`."""

    method: str
    count: int
    make_messages: Callable[[], Sequence[bytes]]

    async def send(self, attacker: Attacker) -> str:
        async with attacker.turn:
            return await asyncio.to_thread(self._hold, attacker.site.grpc_address)

    def _hold(self, address: str) -> str:
        messages = self.make_messages()
        queues = [Queue[bytes | None]() for _ in range(self.count)]
        with ExitStack() as stack:
            calls = []
            for queue in queues:
                stack.callback(queue.put, None)  # ends the thread that sends
                for message in messages:
                    queue.put(message)
                channel = stack.enter_context(grpc_channel(address))
                method = channel.stream_stream(self.method)
                calls.append(method(iter(queue.get, None), timeout=HOLD_S, metadata=CREDENTIALS))
            codes = [call.code() for call in calls]
            return str(codes[-1].name)


@dataclass(frozen=True)
class FrameWriter:
    """A client of gRPC that writes HTTP/2 frames as it likes."""

    method: str
    write: Callable[[Http2Connection, str], str]

    async def send(self, attacker: Attacker) -> str:
        def run() -> str:
            try:
                with Http2Connection(attacker.site.grpc_address) as client:
                    return self.write(client, self.method)
            except ConnectionError:  # as a client of gRPC reports it
                return "UNAVAILABLE"

        return await asyncio.to_thread(run)


# Bodies of /v1.


def infer(
    model: str, content_type: str, make_body: Callable[[], bytes], *headers: str
) -> HttpRequest:
    return HttpRequest(f"/v1/models/{model}/infer", content_type, make_body, headers)


def fixed(content: bytes) -> Callable[[], bytes]:
    return lambda: content


def refused(
    *requests: Request, with_: str = "400 413 422", cpu_s: float = 0.5, memory_mib: float = 128
) -> Attack:
    return Attack(requests, frozenset(with_.split()), cpu_s, memory_mib)


def json_object(size: int, **before: object) -> bytes:
    """A JSON object of so many keys."""
    return json.dumps({**before, **{f"k{number}": number for number in range(size)}}).encode()


def rows(name: str, size: int, **before: object) -> Callable[[], bytes]:
    return lambda: json.dumps({**before, name: ["a"] * size}).encode()


def zip_bomb(size: int) -> bytes:
    """Return an archive whose one array claims, and inflates to, so many bytes."""
    return hostile.archive([("X.npy", bytes(size))])


def bzip2_bomb() -> bytes:
    """Less than a kilobyte that inflates to 96 MiB, and says that it does not."""
    zeros = hostile.npy(np.zeros(96 * MIB, np.uint8))
    return hostile.claiming_size(hostile.archive([("x.npy", zeros)], zipfile.ZIP_BZIP2), 100)


@cache
def archived_zeros() -> bytes:
    return hostile.archive([("x.npy", hostile.npy(np.zeros(96 * MIB, np.uint8)))])


def overlapping_entries() -> bytes:
    archived = hostile.archive([("x.npy", hostile.npy(np.zeros(3, np.float32)))])
    return hostile.overlapping(archived, 9)


def directory(size: int) -> bytes:
    archived = hostile.archive([("x", b"")], zipfile.ZIP_STORED)
    start = archived.rindex(b"PK\1\2")
    end = archived.rindex(b"PK\5\6")
    return archived[:start] + archived[start:end] * (size // (end - start)) + archived[end:]


def tiny_images(size: int) -> bytes:
    return hostile.json_of([hostile.b64(encoded(Image.new("L", (1, 1))))] * size)


def large_images(size: int) -> bytes:
    return hostile.json_of([hostile.b64(encoded(Image.new("L", (5000, 5000))))] * size)


def webp_of_chunks(size: int) -> bytes:
    content = b"WEBPVP8X\n\0\0\0" + bytes(10) + b"abcd\0\0\0\0" * size
    return b"RIFF" + len(content).to_bytes(4, "little") + content


def inflating_texts() -> bytes:
    text = hostile.chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB)))
    return hostile.after_size(hostile.png(), text * 50)


def inflating_profile() -> bytes:
    profile = hostile.chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50 * MIB)))
    return hostile.after_size(hostile.png(), profile)


EXIF_BLOCKS = (
    hostile.exif((0x0112, 2, 4, b"abc\0")),
    hostile.exif((0x0112, 7, 4, b"\xff\xff\xff\xff")),
    hostile.exif((0x0112, 4, 1, b"\xff\xff\xff\xff")),
    hostile.exif((0x0112, 5, 1, b"\xff\xff\xff\x7f")),  # a rational out of the file
    b"II*\0\x08\0\0\0\xff\xff",  # a loop
)


def image_attacks() -> Iterator[tuple[str, Attack]]:
    jpeg = partial(infer, "images", JPEG)
    grey = partial(infer, "images", PNG)
    progressive = IMAGES[JPEG][1]
    yield "1 MiB of fill bytes in a JPEG", refused(jpeg(partial(hostile.padded_jpeg, MIB)))
    yield (
        "48 MiB of fill bytes in a JPEG",
        refused(jpeg(partial(hostile.padded_jpeg, 48 * MIB)), memory_mib=192),
    )
    yield "fill bytes in a JPEG's data", refused(jpeg(partial(hostile.padded_data, 32 * MIB)))
    yield (
        "a progressive JPEG of fill bytes",
        refused(jpeg(lambda: hostile.after_start(progressive, b"\xff" * MIB))),
    )
    yield "2,000 scans of 4 megapixels", refused(jpeg(partial(hostile.jpeg_of_scans, 2000, 2000)))
    yield "5,000 scans of 25 megapixels", refused(jpeg(partial(hostile.jpeg_of_scans, 5000, 5000)))
    yield (
        "64 scans of 25 megapixels",
        refused(jpeg(partial(hostile.jpeg_of_scans, 64, 5000)), with_="200", cpu_s=8),
    )
    blocks = [jpeg(partial(hostile.with_exif, hostile.jpeg(), block)) for block in EXIF_BLOCKS]
    yield "EXIF of texts, loops and large numbers", refused(*blocks, with_="200")
    yield "a million PNG chunks", refused(grey(partial(hostile.png_of_chunks, MIB)))
    yield "a PNG without its palette", refused(grey(hostile.png_without_palette))
    inflating = grey(inflating_texts), grey(inflating_profile)
    yield "a PNG's texts and profile that inflate", refused(*inflating, with_="200 422")
    yield "a million WebP chunks", refused(infer("images", WEBP, partial(webp_of_chunks, MIB)))
    yield (
        "50,000 tiny images",
        refused(infer("images", JSON, partial(tiny_images, 50_000)), cpu_s=4),
    )
    yield (
        "40 images of 25 megapixels",
        refused(infer("free_images", JSON, partial(large_images, 40))),
    )
    yield "bytes that are no image", refused(infer("images", BYTES, partial(bytes, 48 * MIB)))


def numpy_attacks() -> Iterator[tuple[str, Attack]]:
    npy = partial(infer, "free_texts", NPY)
    npz = partial(infer, "numbers", NPZ)
    headers = [*hostile.NPY_HEADERS.values(), b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65_535]
    yield ".npy: headers that contradict themselves", refused(*map(npy, map(fixed, headers)))
    nothing = hostile.npy_of(f"({10**15},)", "'|S0'")
    yield ".npy: a file of nothing", refused(infer("numbers", NPY, fixed(nothing)))
    yield (
        ".npz: an archive that inflates",
        refused(
            npz(partial(zip_bomb, 64 * MIB)),
            npz(archived_zeros),
            npz(bzip2_bomb),
            cpu_s=2,
            memory_mib=200,
        ),
    )
    yield (
        ".npz: a bomb of a small size",
        refused(
            npz(lambda: hostile.claiming_size(archived_zeros(), 100)), npz(overlapping_entries)
        ),
    )
    yield (
        ".npz: a directory of 48 MiB",
        refused(npz(partial(directory, 48 * MIB)), cpu_s=1, memory_mib=200),
    )


def form_attacks() -> Iterator[tuple[str, Attack]]:
    form = partial(infer, "texts", f"multipart/form-data; boundary={hostile.BOUNDARY}")
    field_start = b'--b\r\nContent-Disposition: form-data; name="X"\r\n\r\n'
    deep = hostile.field(b"[" * 64 + b"1" + b"]" * 64, headers=[f"Content-Type: {JSON}"])
    parameters = partial(json_object, 300_000)
    yield "a form's header of 48 MiB", refused(form(lambda: b"--b\r\nX: " + b"y" * (48 * MIB)))
    yield "a form's million headers", refused(form(lambda: b"--b\r\n" + b"X: y\r\n" * (8 * MIB)))
    yield (
        "a form's padding of 48 MiB",
        refused(form(lambda: b"--b\r\n\r\n\r\n--b" + b" " * (48 * MIB))),
    )
    yield (
        "a form of almost delimiters",
        refused(form(lambda: field_start + b"\r\n--bX" * (8 * MIB)), cpu_s=2),
    )
    yield "a form's lists of 64 dimensions", refused(form(lambda: hostile.form(deep, deep)))
    yield (
        "a form's 300,000 parameters",
        refused(
            form(
                lambda: hostile.form(hostile.field(parameters(), "parameters"), hostile.field(b"a"))
            )
        ),
    )


def json_attacks() -> Iterator[tuple[str, Attack]]:
    texts = partial(infer, "texts", JSON)
    yield (
        "lists of nothing",
        refused(
            infer("numbers", JSON, lambda: b'{"inputs": [' + b"[]," * MIB + b"1]}"),
            cpu_s=3,
            memory_mib=200,
        ),
    )
    yield (
        "a data: URI without a comma",
        refused(texts(lambda: hostile.json_of({"b64": "data:" + ";" * (8 * MIB)}))),
    )
    yield (
        "a data: URI of escapes",
        refused(
            texts(lambda: hostile.json_of({"b64": "data:," + "%41" * (8 * MIB)})),
            cpu_s=1,
            memory_mib=200,
        ),
    )
    yield "500,000 rows of a batch", refused(texts(rows("inputs", 500_000)))
    yield (
        "300,000 parameters",
        refused(
            texts(
                lambda: json.dumps(
                    {"inputs": "a", "parameters": json.loads(json_object(300_000))}
                ).encode()
            )
        ),
    )
    predict = "/v1/models/{}:predict".format
    many = rows("instances", 500_000)
    yield (
        "500,000 rows of :predict",
        refused(
            HttpRequest(predict("single"), JSON, many), HttpRequest(predict("texts"), JSON, many)
        ),
    )
    yield (
        "1,000 rows for a model without batching",
        refused(HttpRequest(predict("single"), JSON, rows("instances", 1000)), with_="200"),
    )
    yield (
        "500,000 rows of TorchServe",
        refused(HttpRequest("/predictions/single", JSON, rows("instances", 500_000))),
    )
    yield (
        "500,000 texts for vectors",
        refused(HttpRequest("/v1/embeddings", JSON, rows("input", 500_000, model="plain_vectors"))),
    )
    yield (
        "a batch of 10,000,000 rows, and one of 40,000,000 lines without a row",
        refused(
            HttpRequest("/v1/models/numbers/jobs", NDJSON, lambda: b"1\n" * 10_000_000),
            HttpRequest("/v1/models/numbers/jobs", NDJSON, lambda: b"\n" * (40 * MIB)),
        ),
    )
    yield (
        "500,000 documents to rank",
        refused(
            HttpRequest(
                "/v1/rerank", JSON, rows("documents", 500_000, model="relevance", query="a")
            )
        ),
    )
    prompts = partial(json_object, 300_000, model="texts", prompt="a", messages=[])
    yield (
        "a completion with 300,000 keys",
        refused(
            HttpRequest("/v1/completions", JSON, prompts),
            HttpRequest("/v1/chat/completions", JSON, prompts),
            with_="501",  # there is no server of completions, but the keys are read before
        ),
    )
    asked = [infer(model.name, JSON, fixed(b'{"inputs": [1, 2]}')) for model in ON_DEMAND]
    yield "8 models on demand in turn", Attack(tuple(asked), frozenset(("200",)), 4, 64)


def text_attacks() -> Iterator[tuple[str, Attack]]:
    text = partial(infer, "texts")
    long_types = TEXT + '; a="' + ";" * 60_000 + '"', TEXT + ';a=";' * 12_000
    yield (
        "Content-Types of 60 KB",
        refused(
            *(text(content_type, fixed(b"a text")) for content_type in long_types), with_="415"
        ),
    )
    yield "an Accept of 60 KB", refused(text(TEXT, fixed(b"x"), "Accept: " + "a/b;q=0.1," * 6000))
    yield (
        "a text of Shift JIS without ends",
        refused(text(f"{TEXT}; charset=shift_jis", lambda: b"\x81" * (2 * MIB + 1))),
    )
    yield (
        "a text of GB 18030",
        refused(
            text(f"{TEXT}; charset=gb18030", lambda: "한".encode("gb18030") * MIB), with_="200"
        ),
    )
    yield (
        "a JSON of GB 18030",
        refused(
            text(
                "application/json; charset=gb18030",
                lambda: b'{"inputs": "' + "한".encode("gb18030") * (12 * MIB) + b'"}',
            ),
            with_="200 413",
            memory_mib=400,
        ),
    )
    yield (
        "gzip and deflate that decompress to 256 MiB",
        refused(
            text(TEXT, partial(gzip_bomb, 256), GZIP),
            text(TEXT, partial(deflate_bomb, 256), DEFLATE),
            cpu_s=4,
        ),
    )


@cache
def zlib_bomb(size_mib: int, window_bits: int) -> bytes:
    packed = zlib.compressobj(9, wbits=window_bits)
    piece = bytes(MIB)
    return b"".join(packed.compress(piece) for _ in range(size_mib)) + packed.flush()


gzip_bomb = partial(zlib_bomb, window_bits=16 + zlib.MAX_WBITS)
deflate_bomb = partial(zlib_bomb, window_bits=zlib.MAX_WBITS)


def management_attacks() -> Iterator[tuple[str, Attack]]:
    """Other bodies, which are small JSON objects."""

    def manage(path: str, method: str = "POST") -> HttpRequest:
        return HttpRequest(path, JSON, partial(json_object, 100_000), method=method, key=keys.ADMIN)

    repository = "/v2/repository/models/texts"
    yield (
        "100,000 keys of a management call",
        refused(
            manage("/v2/repository/index"),
            manage(f"{repository}/load"),
            manage(f"{repository}/unload"),
            manage("/v1/models/texts/labels/stable", "PUT"),
            manage("/v1/log-level", "PUT"),
            manage("/v2/logging"),
            manage("/v2/trace/setting"),
            manage("/v2/models/texts/trace/setting"),
        ),
    )


# Bodies of /v2.


def passthrough_attacks() -> Iterator[tuple[str, Attack]]:
    shapes = b'"' + b'"shape":[' * 6800
    unfinished = partial(HttpRequest, "/v2/models/nobody/infer", JSON)
    yield (
        "unfinished shapes",
        refused(
            unfinished(fixed(shapes)),
            unfinished(fixed(gzip.compress(shapes)), (GZIP,)),
            with_="400 404",
        ),
    )
    yield (
        "keys of infer and generate",
        refused(
            HttpRequest("/v2/models/texts/infer", JSON, partial(json_object, 100_000)),
            HttpRequest("/v2/models/texts/generate", JSON, partial(json_object, 100_000)),
        ),
    )


# Calls of gRPC.


def infer_message(model: str, **fields: Any) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="X", datatype="FP32", shape=[2])
    message.raw_input_contents.append(bytes(8))
    return message


def message_of_parameters(size: int) -> bytes:
    message = infer_message("echo")
    for number in range(size):
        message.parameters[f"p{number}"].int64_param = number
    return bytes(message.SerializeToString())


def message_of_integers(size: int) -> bytes:
    """A number of one byte in the request has eight in the response."""
    message = service_pb2.ModelInferRequest(model_name="integers")
    tensor = message.inputs.add(name="X", datatype="INT64", shape=[1, size])
    tensor.contents.int64_contents.extend([1] * size)
    return bytes(message.SerializeToString())


def message_of_size(size: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="numbers")
    message.inputs.add(name="X", datatype="FP32", shape=[1, 1, size // 4])
    message.raw_input_contents.append(bytes(size))
    return bytes(message.SerializeToString())


def long_name(number: int) -> bytes:
    return bytes(infer_message(f"{number}{'x' * 200_000}").SerializeToString())


def send_bomb(client: Http2Connection, method: str) -> str:
    stream = client.start_call(method, grpc_encoding="gzip", x_api_key=keys.INFER)
    client.send_data(stream, encode_message(gzip_bomb(512), is_compressed=True), is_last=True)
    return grpc_code(client.wait_for_status())


def send_resets(client: Http2Connection, method: str) -> str:
    # After more, the server would wait until its answers are read.
    message = encode_message(infer_message("echo").SerializeToString())
    for _ in range(1000):
        stream = client.start_call(method, x_api_key=keys.INFER)
        reset = encode_frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big"))
        try:
            client.send(encode_frame(DATA, 1, stream, message), reset)
        except ConnectionError:
            break  # the server may have had enough
    return "CANCELLED"


def grpc_code(number: int) -> str:
    return next(str(code.name) for code in grpc.StatusCode if code.value[0] == number)


HEALTH = "/grpc.health.v1.Health"
REFLECTION = "ServerReflection/ServerReflectionInfo"
SMALL_METHODS = (
    *(
        f"{SERVICE}/{name}"
        for name in (
            "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig",
            "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
            "TraceSetting", "LogSettings", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
        )
    ),
    f"{HEALTH}/Check",
    f"/grpc.reflection.v1.{REFLECTION}",
    f"/grpc.reflection.v1alpha.{REFLECTION}",
)  # fmt: skip


def grpc_attacks() -> Iterator[tuple[str, Attack]]:
    refusals = "INVALID_ARGUMENT RESOURCE_EXHAUSTED NOT_FOUND DEADLINE_EXCEEDED"
    small = bytes(infer_message("echo").SerializeToString())
    for size in (17, 63):
        metadata = (("x-large", "a" * (size * KIB - 100)),)
        yield (
            f"gRPC: metadata of {size} KiB",
            refused(
                GrpcCall(INFER, fixed(small), metadata),
                GrpcCall(STREAM, fixed(small), metadata),
                with_=refusals,
            ),
        )
    yield (
        "gRPC: 300,000 parameters",
        refused(GrpcCall(INFER, partial(message_of_parameters, 300_000)), with_=refusals),
    )
    yield (
        "gRPC: a stream's 300,000 parameters",
        refused(GrpcCall(STREAM, partial(message_of_parameters, 300_000)), with_="OK"),
    )
    names = [GrpcCall(INFER, partial(long_name, number)) for number in range(400)]
    yield (
        "gRPC: 400 unknown names of 200 KB",
        refused(*names, with_=refusals, cpu_s=4, memory_mib=48),
    )
    yield (
        "gRPC: a message that inflates to 512 MiB",
        refused(FrameWriter(INFER, send_bomb), with_=f"{refusals} UNAVAILABLE", cpu_s=3),
    )
    yield (
        "gRPC: 5,000 calls that are reset",
        refused(*[FrameWriter(INFER, send_resets)] * 5, with_="CANCELLED", cpu_s=3),
    )
    yield (
        "gRPC: 60 streams that do not read",
        refused(
            HeldCalls(STREAM, 60, lambda: [message_of_size(4 * MIB)] * 4),
            with_=refusals,
            cpu_s=5,
            memory_mib=600,
        ),
    )
    yield (
        "gRPC: 60 streams with responses eight times as large",
        refused(
            HeldCalls(STREAM, 60, lambda: [message_of_integers(2 * MIB)] * 4),
            with_=refusals,
            cpu_s=5,
            memory_mib=600,
        ),
    )
    yield "gRPC: 60 silent calls", refused(HeldCalls(INFER, 60, tuple), with_=refusals)
    fields = b"\x78\1" * (2 * MIB)
    # It reads no message, and goes on until its client leaves.
    watches = HeldCalls(f"{HEALTH}/Watch", 60, lambda: [fields])
    yield "gRPC: 60 calls that watch", refused(watches, with_=refusals, cpu_s=2)
    calls = [GrpcCall(method, fixed(fields)) for method in SMALL_METHODS]
    yield (
        "gRPC: messages of two million fields",
        refused(*calls, with_=f"{refusals} OK PERMISSION_DENIED"),
    )


# Uploads.


def small_files(size: int) -> Iterator[tuple[str, bytes]]:
    config = (
        'backend: "onnxruntime" max_batch_size: 0 '
        'input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } '
        'output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }'
    )
    yield "config.pbtxt", config.encode()
    yield "1/model.onnx", FIRST
    for number in range(size):
        yield f"1/{number}", b""


def pack_tar(files: Iterable[tuple[str, bytes]], mode: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


@cache
def tar_of_small_files() -> bytes:
    return pack_tar(small_files(9_900), "w:gz")


def deep_folders() -> bytes:
    return hostile.archive((f"{number}/{'a/' * 14}b", b"") for number in range(5000))


def headers_of_tar() -> bytes:
    header = tarfile.TarInfo("x")
    content = b"6 a=b\n" * 10_000
    header.type = b"x"
    header.size = len(content)
    return (header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)) * 400


CONFIGS = (
    "instance_group { count: 1000000 }",
    'model_warmup { name: "a" count: 4294967295 inputs { key: "X" value { dims: 2 zero_data: true } } }',
    "dynamic_batching { priority_levels: 18446744073709551615 }",
    "sequence_batching { oldest { max_candidate_sequences: 2147483647 } }",
)


def upload_attacks() -> Iterator[tuple[str, Attack]]:
    yield (
        "an upload of 9,900 tiny files",
        refused(Upload(".tar.gz", tar_of_small_files), with_="201", cpu_s=5),
    )
    yield (
        "an upload of 50,000 empty gzip members",
        refused(Upload(".tar.gz", lambda: gzip.compress(b"") * 50_000)),
    )
    yield "a ZIP file of 70,000 folders", refused(Upload(".zip", cache(deep_folders)), cpu_s=3)
    yield "a tar file of 24 MB of headers", refused(Upload(".tar", headers_of_tar), cpu_s=4)
    yield (
        "a network of millions of fields",
        refused(Upload(".onnx", lambda: b"\x08\x0a" + b"\x3a\0" * (8 * MIB)), cpu_s=1),
    )
    yield "a graph of 16 MiB that is none", refused(Upload(".xml", lambda: b"<?xml " * (3 * MIB)))
    configs = [Upload("config", fixed(text.encode())) for text in CONFIGS]
    yield "configs of a million instances or 2^32 warm-ups", refused(*configs, cpu_s=1)
    yield (
        "a config of a million fields",
        refused(Upload("config", lambda: b"instance_group{}" * 60_000), cpu_s=3),
    )


# Files that the gateway watches.


def write_keys(path: Path) -> None:
    entries = [
        *keys.ENTRIES,
        *(keys.entry(f"tgw_{number}-secret", "infer") for number in range(10_000)),
    ]
    path.write_text(yaml.dump({"keys": entries}, Dumper=yaml.CSafeDumper))


def file_attacks() -> Iterator[tuple[str, Attack]]:
    accepted = partial(refused, with_="accepted", cpu_s=4)
    rejected = partial(refused, with_="rejected", cpu_s=2)
    yield "a keys file of 10,000 keys", accepted(FileChange("keys", write_keys, "tgw_9999-secret"))
    yield "a keys file that is a pipe", rejected(FileChange("keys", os.mkfifo))
    yield (
        "a models file of a million brackets",
        rejected(
            FileChange("models", lambda path: void(path.write_text("models: " + "[" * 1_000_000)))
        ),
    )
    yield (
        "a models file of 10 MB",
        rejected(FileChange("models", lambda path: void(path.write_text(" " * 10_000_001)))),
    )


def void(_: object) -> None:
    pass


ATTACKS: Mapping[str, Attack] = dict(
    attack
    for attacks in (
        image_attacks, numpy_attacks, form_attacks, json_attacks, text_attacks, management_attacks,
        passthrough_attacks, grpc_attacks, upload_attacks, file_attacks,
    )
    for attack in attacks()
)  # fmt: skip
