"""The requests of the API, and their responses, as values: no I/O, so that both clients share them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from math import ceil
from typing import Any, Final
from urllib.parse import quote, urlencode

from gateway.client.bodies import Body, CallInputs, Form, contains_files, encode_inputs, encode_json
from gateway.client.errors import INVALID_RESPONSE, TIMEOUT, GatewayError, InvalidRequest
from gateway.client.models import ModelInfo, parse_model
from gateway.client.replies import (
    LineBuffer,
    Reply,
    decode_object,
    make_error,
    make_invalid_response_error,
    parse_json_object,
)
from gateway.client.results import InferResult, parse_result
from gateway.client.retries import Attempts
from gateway.client.uploads import ModelSource, StreamedBody, UploadContent
from gateway.media_types import JSON, NDJSON, NPZ

DEFAULT_TIMEOUT_S: Final = 60.0
DEFAULT_RETRIES: Final = 10
# Loads and transfers of models.
OPERATION_TIMEOUT_S: Final = 600.0
READY_POLL_S: Final = 0.5
MODEL_INFO_TTL_S: Final = 60.0
DOT_SEGMENTS: Final = (".", "..")
MAX_KNOWN_MODELS: Final = 1000
SEQUENCE_PARAMETER: Final = "sequence_id"
SEQUENCE_HEADER: Final = "x-sequence-id"
JOBS_PATH: Final = "/v1/jobs"
# A request waits for less than the time limits of proxies, and is repeated.
JOB_WAIT_S: Final = 20
JOB_REQUEST_TIMEOUT_S: Final = 40.0
ENDED_STATES: Final = ("done", "failed", "cancelled", "expired")


def has_numpy() -> bool:
    return find_spec("numpy") is not None


def quote_part(text: str) -> str:
    return quote(text, safe="")


def build_model_path(name: str, version: str = "") -> str:
    """Return the path of a model. Raises `InvalidRequest` for a name that would make another path of it."""
    if not name or name in DOT_SEGMENTS or version in DOT_SEGMENTS:
        raise InvalidRequest(f"{name!r} with version {version!r} is not a model")
    path = f"/v1/models/{quote_part(name)}"
    return f"{path}/versions/{quote_part(version)}" if version else path


def build_label_path(model: str, label: str) -> str:
    path = f"{build_model_path(model)}/labels"
    return f"{path}/{quote_part(label)}" if label else path


@dataclass(frozen=True)
class ApiRequest:
    """A request of the API. One that is not repeatable is sent again only if it was not executed."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | Form | StreamedBody | None = None
    is_repeatable: bool = True
    has_deadline: bool = False


@dataclass(frozen=True)
class InferCall:
    """An inference: the model, its inputs and what the user asks for."""

    model: str
    value: Any = None
    by_name: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    classification: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_files(self) -> bool:
        values = [self.value, *self.by_name.values()]
        if isinstance(self.value, Mapping):
            values += self.value.values()
        return any(map(contains_files, values))

    @property
    def needs_name(self) -> bool:
        return self.value is not None and bool(self.by_name)

    def build_request(self, accept: str, info: ModelInfo | None) -> ApiRequest:
        """Return the request. Raises `TypeError` for inputs of an unknown type or without a name."""
        by_name = self.by_name
        if isinstance(self.value, Mapping):
            by_name = {**self.value, **by_name}
        elif self.needs_name and info is not None:
            by_name = {info.find_input_for(by_name): self.value, **by_name}
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_sequence = SEQUENCE_PARAMETER in self.parameters or SEQUENCE_HEADER in headers
        headers = {"idempotency-key": uuid.uuid4().hex, **headers, "accept": accept}
        query = {"classification": str(self.classification)} if self.classification else {}
        return ApiRequest(
            "POST",
            f"{build_model_path(self.model, self.version)}/infer",
            query=query,
            headers=headers,
            body=encode_inputs(CallInputs(self.value, by_name, self.parameters)),
            is_repeatable=not is_sequence,
            has_deadline=True,
        )

    def choose_accept(self, info: ModelInfo | None, *, uses_arrays: bool) -> str:
        """Return `.npz` for numbers that become arrays, else JSON."""
        if info is None or not uses_arrays or self.classification or not info.has_only_numbers:
            return JSON
        return NPZ

    def with_value(self, value: Any) -> InferCall:
        return replace(self, value=value)


def create_infer_call(
    model: str,
    value: Any,
    inputs: Mapping[str, Any],
    *,
    version: str | int,
    parameters: Mapping[str, Any] | None,
    classification: int = 0,
    headers: Mapping[str, str] | None,
) -> InferCall:
    if value is None and not inputs:
        raise TypeError("an inference needs inputs: pass a value, or values by input name")
    return InferCall(
        model,
        value,
        inputs,
        version=str(version),
        parameters=parameters or {},
        classification=classification,
        headers=headers or {},
    )


class ModelInfoCache:
    """Descriptions of models, which are read again after a while: a model may be loaded anew."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], tuple[ModelInfo, float]] = {}

    def get(self, model: str, version: str, now: float) -> ModelInfo | None:
        info, expires_at = self._entries.get((model, version), (None, 0.0))
        return info if now < expires_at else None

    def put(self, model: str, version: str, info: ModelInfo, now: float) -> None:
        if len(self._entries) >= MAX_KNOWN_MODELS:
            self._entries.clear()
        self._entries[model, version] = info, now + MODEL_INFO_TTL_S


def parse_model_reply(reply: Reply) -> ModelInfo:
    return parse_model_document(reply, decode_object(reply))


def parse_models_reply(reply: Reply) -> list[ModelInfo]:
    documents = decode_object(reply).get("models")
    if not isinstance(documents, list):
        raise make_invalid_response_error(reply, "its response has no field 'models'")
    return [parse_model_document(reply, document) for document in documents]


def parse_model_document(reply: Reply, document: Mapping[str, Any]) -> ModelInfo:
    try:
        return parse_model(document)
    except (LookupError, TypeError, AttributeError) as exc:
        reason = f"its response describes no model ({exc!r})"
        raise make_invalid_response_error(reply, reason) from None


def create_load_call(model: str) -> ApiRequest:
    return build_operation_request(model, "load", {})


def create_unload_call(model: str, *, dependents: bool) -> ApiRequest:
    parameters: dict[str, Any] = {"unload_dependents": True} if dependents else {}
    return build_operation_request(model, "unload", parameters)


def create_events_call(since: str | datetime, limit: int) -> ApiRequest:
    if isinstance(since, datetime):
        since = since.astimezone(timezone.utc).isoformat()
    return build_json_request("GET", f"/v1/events?{urlencode({'since': since, 'limit': limit})}")


def build_operation_request(model: str, action: str, parameters: dict[str, Any]) -> ApiRequest:
    document = {"parameters": parameters} if parameters else {}
    return ApiRequest(
        "POST",
        f"/v2/repository/models/{quote_part(model)}/{action}",
        body=encode_json(document),
        is_repeatable=False,
    )


def build_json_request(
    method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
) -> ApiRequest:
    body = None if document is None else encode_json(document)
    return ApiRequest(
        method, path, headers=headers or {}, body=body, is_repeatable=method in ("GET", "HEAD")
    )


def build_submit_request(inference: ApiRequest, callback_url: str) -> ApiRequest:
    """Return the request that makes a job of an inference. Only its own limit ends the job."""
    headers = {**inference.headers, "prefer": "respond-async"}
    if callback_url:
        headers["x-callback-url"] = callback_url
    return replace(inference, headers=headers, has_deadline=False)


def build_job_path(job: str) -> str:
    return f"{JOBS_PATH}/{quote_part(job)}"


class WaitForJob:
    """A wait until a job has ended."""

    def __init__(self, job: str, timeout_s: float) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def build_request(self) -> ApiRequest:
        remaining_s = self._deadline - time.monotonic()
        wait_s = max(min(ceil(remaining_s), JOB_WAIT_S), 0)
        return build_json_request("GET", f"{build_job_path(self._job)}?wait={wait_s}")

    def is_over(self, document: Mapping[str, Any]) -> bool:
        """Return whether the job has ended. Raises `GatewayError` after the time."""
        if document.get("state") in ENDED_STATES:
            return True
        if time.monotonic() >= self._deadline:
            state = document.get("state")
            raise GatewayError(
                f"job {self._job} is still {state} after {self._timeout_s:g} s", TIMEOUT
            )
        return False


def build_upload_request(upload: ModelSource, content: UploadContent) -> ApiRequest:
    return ApiRequest(
        "PUT",
        build_model_path(content.model, upload.version),
        query={} if upload.load else {"load": "false"},
        body=content,
        is_repeatable=False,
    )


def is_model_ready(reply: Reply) -> bool:
    return decode_object(reply).get("ready") is True


class StreamDecoder:
    """Splits the lines of a stream, and decodes them. Its last line may be an error."""

    def __init__(self, reply: Reply, info: ModelInfo | None, attempts: Attempts) -> None:
        self._reply = reply
        self._info = info
        self._attempts = attempts
        self._lines = LineBuffer(reply.url)

    def feed(self, data: bytes) -> Iterator[InferResult]:
        """Yield the results of complete lines. Raises `GatewayError` for a line that is an error."""
        yield from map(self._decode, self._lines.feed(data))

    def finish(self) -> Iterator[InferResult]:
        if line := self._lines.take_rest():
            yield self._decode(line)

    def _decode(self, line: bytes) -> InferResult:
        document = parse_json_object(line)
        if document is None:
            raise GatewayError(
                f"the stream of {self._reply.url} contains a line that is not a JSON object",
                INVALID_RESPONSE,
                self._reply.status,
                request_id=self._reply.request_id,
            )
        message = document.get("error")
        if isinstance(message, str):
            raise make_error(document, message, self._reply)
        reply = self._reply.with_content(line, self._attempts.elapsed_s)
        return parse_result(document, reply, self._info)


def check_stream_type(reply: Reply) -> None:
    if reply.content_type != NDJSON:
        raise make_invalid_response_error(reply, "its response is not a stream")


def split_document(result: InferResult, count: int) -> Sequence[InferResult] | None:
    """Return a result for each item of a batch; None if an output has another number of values."""
    for value in result.values():
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
            return None
        if len(value) != count:
            return None
    return [
        InferResult(
            {name: value[number] for name, value in result.items()},
            model=result.model,
            version=result.version,
            request_id=result.id,
            elapsed_s=result.elapsed_s,
        )
        for number in range(count)
    ]
