"""Everything that reads a client's or a replica's bytes, as targets of fuzzing."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.capabilities.grpc_api.infer_request import MAX_DECODED_BYTES, read_infer_request
from gateway.capabilities.openai.text_vectors import parse_embeddings_request, parse_rerank_request
from gateway.capabilities.tf_serving.bodies import parse_predict_body
from gateway.capabilities.torchserve.forms import parse_prediction_body
from gateway.capabilities.uploads.model_files.model_config import (
    check_data_config,
    parse_model_config,
)
from gateway.capabilities.uploads.model_files.received_body import parse_sha256_digest
from gateway.capacity.archives import ArchiveLimits, read_archive
from gateway.errors import GatewayError
from gateway.headers import parse_accept, parse_content_type
from gateway.media_types import JSON, MULTIPART
from gateway.routes.passthrough.sse import EventStreamScrubber
from gateway.telemetry.exposition import InvalidExposition, parse_families, split_page
from gateway.tensors.images import ImageReader
from gateway.tensors.inputs import JsonParser, decode_body, decode_json_body, to_inputs
from gateway.tensors.json_body import decode_base64_text
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import ChannelLayout, ImageSpec, Signature, build_signature
from gateway.tensors.zip_files import PIECE_BYTES
from gateway.triton.sequence import parse_sequence_headers
from tests.attacks.corpus import IMAGES, V2_BODY, valid_requests
from tests.attacks.fuzzing import MAX_INPUT_BYTES, Target
from tests.support.hostile_files import read_form
from tests.support.servers import ROOT

# What is decoded here is small: large images are decoded in a process that the deadline kills.
LIMITS = PayloadLimits(max_image_pixels=100_000)
REFUSALS = (GatewayError,)
CHARSETS = ("utf-8", "utf-16", "gb18030", "big5", "shift_jis")
EVENTS = b'data: {"error":"a word"}\n\ndata: {"text":"b"}\n\nevent: end\ndata: {}\n\n'


def model(datatype: str, shape: list[int], batch: int = 8) -> Signature:
    metadata = {"name": "X", "datatype": datatype, "shape": [-1, *shape]}
    config = {"max_batch_size": batch, "input": [{"name": "X", "dims": shape}]}
    return build_signature({"name": "m", "inputs": [metadata], "outputs": []}, config)


MODELS = {
    "images": model("FP32", [3, 16, 16]),
    "numbers": model("FP32", [-1, -1]),
    "integers": model("INT16", [-1]),
    "texts": model("BYTES", [1]),
}


def decode_as(content_type: str, kind: str) -> Callable[[bytes], object]:
    if content_type.startswith(MULTIPART):
        return lambda data: to_inputs(read_form(data, content_type), MODELS[kind], LIMITS)
    return lambda data: decode_body(data, content_type, MODELS[kind], LIMITS)


def json_as(kind: str, parse: JsonParser) -> Callable[[bytes], object]:
    return lambda data: decode_json_body(parse, data, JSON, MODELS[kind], LIMITS)


def read_image(data: bytes) -> object:
    spec = ImageSpec(ChannelLayout.CHANNELS_LAST, "RGBA", -1, -1)
    return ImageReader(spec, LIMITS, "X").read(data)


def scrub_events(data: bytes) -> object:
    scrubbed = EventStreamScrubber(lambda event: event)
    passed = [scrubbed.feed(data[start : start + 1000]) for start in range(0, len(data), 1000)]
    return b"".join(passed) + scrubbed.end()


def latin_1(function: Callable[[str], Any]) -> Callable[[bytes], object]:
    return lambda data: function(data.decode("latin-1"))


def body_targets() -> Iterator[Target]:
    seeds: dict[tuple[str, str], list[bytes]] = {}
    for kind in MODELS:
        for request in valid_requests(kind, kind, kind):
            if request.path.startswith("/v1") and not request.headers:
                seeds.setdefault((request.content_type, kind), []).append(request.body)
    for (content_type, kind), bodies in seeds.items():
        name = f"{content_type.partition(';')[0]} for {kind}"
        yield Target(name, decode_as(content_type, kind), bodies, REFUSALS)


def targets() -> list[Target]:
    images = [body for bodies in IMAGES.values() for body in bodies]
    page = (ROOT / "tests/data/triton_metrics.txt").read_bytes()[: MAX_INPUT_BYTES // 8]
    named = [b'{"data": [1, 2.5]}', b'{"X": {"b64": "AAEC"}}', b"[[1, 2], [3, 4]]"]
    predict = [b'{"instances": [[1, 2], [3, 4]]}', b'{"inputs": {"X": [[1.5]]}}']
    return [
        *body_targets(),
        *(
            Target(f"text in {charset}", decode_as(f"text/plain; charset={charset}", "texts"),
                   ["a text, naïve".encode("utf-8" if charset != "utf-16" else "utf-16")], REFUSALS)
            for charset in CHARSETS
        ),
        Target("embeddings", parse_embeddings_request, [b'{"model": "m", "input": ["a", "b"]}'], REFUSALS),
        Target(
            "reranking", parse_rerank_request, [b'{"model": "m", "query": "a", "documents": ["b"]}'], REFUSALS
        ),
        *(
            Target(f":predict for {kind}", json_as(kind, parse_predict_body), predict, REFUSALS)
            for kind in MODELS
        ),
        *(
            Target(f"TorchServe's JSON for {kind}", json_as(kind, parse_prediction_body), named, REFUSALS)
            for kind in MODELS
        ),
        Target("images", read_image, images, REFUSALS),
        Target("Content-Type", latin_1(parse_content_type), [b'text/plain; charset="utf-8"'], REFUSALS),
        Target("Accept", latin_1(parse_accept), [b"image/png;q=0.5, */*"], REFUSALS),
        Target("base64", latin_1(decode_base64_text), [b"data:a/b;base64,AAEC", b"AAEC"], REFUSALS),
        Target(
            "sequence headers", latin_1(lambda text: parse_sequence_headers(text, text)), [b"7"], REFUSALS
        ),
        Target("event streams", scrub_events, [EVENTS], REFUSALS),
        Target(
            "metrics pages", lambda data: parse_families(split_page(data)), [page],
            (InvalidExposition,),
        ),
        Target("gRPC inference requests", read_infer_request, infer_messages(), REFUSALS),
        *screening_targets(),
        *upload_targets(),
    ]  # fmt: skip


def infer_messages() -> list[bytes]:
    """A request that is decoded as a whole, and one whose tensors are skipped."""
    request = service_pb2.ModelInferRequest(model_name="m", model_version="1", id="i")
    request.parameters["sequence_id"].int64_param = 7
    tensor = request.inputs.add(name="X", datatype="FP32", shape=[2, 3])
    tensor.parameters["p"].string_param = "v"
    request.outputs.add(name="Y").parameters["classification"].int64_param = 2
    request.raw_input_contents.append(bytes(24))
    small = request.SerializeToString()
    request.raw_input_contents.append(bytes(MAX_DECODED_BYTES))
    return [small, request.SerializeToString()]


def upload_targets() -> Iterator[Target]:
    def extract_from(suffix: str) -> Callable[[bytes], None]:
        return lambda data: extract(data or b"P", suffix)

    def check_config(data: bytes) -> None:
        # Parsed in a thread, at the speed of Python.
        check_data_config(parse_model_config(data[: 8 << 10], allow_unknown_fields=True))

    def extract(data: bytes, suffix: str) -> None:
        with TemporaryFile() as file:
            file.write(data)
            file.flush()
            for _, pieces in read_archive(file, suffix, ArchiveLimits(1 << 20, 100)):
                for piece in pieces:
                    assert len(piece) <= PIECE_BYTES

    plain = BytesIO()
    packed = BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("model/" + "long" * 40))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("model/1/model.onnx", b"x" * 1000)
    tars = [plain.getvalue()]
    zips = [packed.getvalue()]
    yield Target("tar archives", extract_from(".tar"), tars, REFUSALS)
    yield Target("ZIP archives", extract_from(".zip"), zips, REFUSALS)
    configs = [b'name: "m" input { name: "X" dims: [ 1 ] }', b'{"name": "m", "input": []}']
    yield Target("model configs", check_config, configs, REFUSALS)
    yield Target("digests", latin_1(parse_sha256_digest), [b"sha-256=:AAAA:"], REFUSALS)


def screening_targets() -> Iterator[Target]:
    from gateway.triton.json_guard import JsonGuard  # noqa: PLC0415

    def screen(data: bytes) -> None:
        screening = JsonGuard(len(data))
        for start in range(0, len(data), 1000):
            screening.feed(data[start : start + 1000])
        screening.finish()

    yield Target("JSON of /v2", screen, [V2_BODY, b'{"a": [1, {"shape": [2]}]}'], REFUSALS)
