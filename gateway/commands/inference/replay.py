"""`triton-gateway infer --replay`: sends the sampled requests of a file again."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Final
from urllib.parse import quote

import orjson
import uvloop

from gateway.client import GatewayError
from gateway.client.arrays import decode_tensor
from gateway.client.batches import OrderedTasks
from gateway.client.bodies import Body, encode_document
from gateway.client.calls import ApiRequest, build_model_path
from gateway.client.errors import UNREACHABLE
from gateway.client.retries import Attempts
from gateway.client.transport import AsyncTransport
from gateway.commands.errors import ClientError, UsageError
from gateway.commands.flags import InferFlags
from gateway.commands.inference.inputs import report_unreadable
from gateway.commands.inference.pipes import write_descriptor
from gateway.commands.inference.samples import Document, parse_event
from gateway.commands.target import Target, make_command_error
from gateway.media_types import NDJSON
from gateway.messages import escape_unprintable_json, print_message

STDOUT_DESCRIPTOR: Final = 1
ERROR_STATUS: Final = 400
REQUEST_TYPE: Final = "org.kubeflow.serving.inference.request"
MODEL_PATH: Final = re.compile(r"(/v[12]/models/[^/:]+)(?:/(?:versions|labels)/[^/:]+)?(?=[/:])")
GRPC_SERVICE: Final = "/inference.GRPCInferenceService/"
STREAM_METHOD: Final = f"{GRPC_SERVICE}ModelStreamInfer"
# Headers of a request, by the attributes of its event.
HEADERS: Final = {
    "contentencoding": "content-encoding",
    "jsonlength": "inference-header-content-length",
    "accept": "accept",
}


class Replay:
    """A run of the command; without a model, the requests of all models are sent."""

    def __init__(
        self, target: Target, file: Path, flags: InferFlags, *, model: str, version: str
    ) -> None:
        self._file = file
        self._flags = flags
        self._model = model
        self._version = version
        self._transport = AsyncTransport(target.access, None)
        self._counts: Counter[str] = Counter()

    def run(self) -> int:
        """Send the requests, print a line of JSON for each, and return the exit status."""
        if self._flags.output is not None:
            raise UsageError("--replay prints to the standard output; --output is not for it")
        uvloop.run(self._send_all())
        counts = self._counts
        if not counts:
            of_model = f" of model {self._model}" if self._model else ""
            raise ClientError(f"{self._file} has no sampled requests{of_model}")
        print_message(
            f"{counts['succeeded']} succeeded, {counts['failed']} failed, of which {counts['new']} had not "
            f"failed before; {counts['skipped']} skipped, because their body is incomplete, their path names "
            "no model, or they are damaged"
        )
        return 1 if counts["failed"] else 0

    async def _send_all(self) -> None:
        tasks = OrderedTasks(self._send, self._read_samples(), self._flags.concurrency)
        async with aclosing(self._transport), aclosing(tasks):
            async for record in tasks:
                line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()
                printable = escape_unprintable_json(line).encode()
                await write_descriptor(STDOUT_DESCRIPTOR, printable)

    async def _read_samples(self) -> AsyncIterator[tuple[Document, ApiRequest]]:
        """Yield the requests to send, with their events. Raises `UsageError`."""
        with report_unreadable(str(self._file)), self._file.open("rb") as lines:
            for event in map(parse_event, lines):
                if event is None or event.get("type") != REQUEST_TYPE:
                    continue
                if self._model and event.get("model") != self._model:
                    continue
                request = self._rebuild_request(event)
                if request is None:
                    self._counts["skipped"] += 1
                else:
                    yield event, request

    def _rebuild_request(self, sample: Document) -> ApiRequest | None:
        is_complete = sample.keys().isdisjoint(("datalength", "redacted"))
        if not is_complete or not sample.keys() >= {"id", "model", "statuscode"}:
            return None
        try:
            if self._version and not MODEL_PATH.match(find_path(sample)):
                return None
            return rebuild_request(sample, self._version)
        except (LookupError, TypeError, ValueError):
            return None

    async def _send(self, sampled: tuple[Document, ApiRequest]) -> Document:
        sample, request = sampled
        before = sample["statuscode"]
        record = {"input": sample["id"], "model": sample["model"], "sampled_status": before}
        attempts = Attempts(self._flags.timeout, max_retries=0)
        try:
            reply = await self._transport.read(request, attempts)
        except GatewayError as exc:
            if exc.code == UNREACHABLE:
                raise make_command_error(exc) from None
            self._counts["failed"] += 1
            self._counts["new"] += before < ERROR_STATUS
            return {**record, "status": exc.status, "error": str(exc), "code": exc.code}
        self._counts["succeeded"] += 1
        return {**record, "status": reply.status}


def find_path(sample: Document) -> str:
    """Return the path of the request; of one over gRPC, the path of the same request over HTTP."""
    path: str = sample["path"]
    if not path.startswith(GRPC_SERVICE):
        return path
    model_path = build_model_path(sample["model"], sample.get("modelversion", ""))
    # Over HTTP, Triton itself has no streams of requests.
    return f"{model_path if path == STREAM_METHOD else model_path.replace('/v1/', '/v2/', 1)}/infer"


def rebuild_request(sample: Document, version: str) -> ApiRequest:
    path = find_path(sample)
    if version:
        path = MODEL_PATH.sub(rf"\1/versions/{quote(version, safe='')}", path, count=1)
    headers = {"x-no-sample": "replay"}
    headers |= {header: str(sample[name]) for name, header in HEADERS.items() if name in sample}
    body = Body(decode_data(sample), sample.get("datacontenttype", ""))
    if sample["path"] == STREAM_METHOD:
        headers = {"x-no-sample": "replay", "accept": NDJSON}
        body = rebuild_inputs(body.content, int(sample["jsonlength"]))
    return ApiRequest("POST", path, headers=headers, body=body, has_deadline=True)


def rebuild_inputs(data: bytes, json_length: int) -> Body:
    """Return the inputs of a document with binary tensors as JSON for `/infer`, which also streams."""
    document = orjson.loads(data[:json_length])
    inputs = {}
    start = json_length
    for tensor in document["inputs"]:
        end = start + tensor["parameters"]["binary_data_size"]
        values = decode_tensor(data[start:end], tensor["datatype"])
        inputs[tensor["name"]] = values.reshape(tensor["shape"]).tolist()
        start = end
    parameters = document["parameters"]
    parameters.pop("binary_data_output", None)
    return encode_document(inputs, parameters)


def decode_data(sample: Document) -> bytes:
    if "data_base64" in sample:
        return base64.b64decode(sample["data_base64"])
    if "data" not in sample:
        return b""
    is_json = "json" in sample.get("datacontenttype", "json").lower()
    return orjson.dumps(sample["data"]) if is_json else sample["data"].encode()
