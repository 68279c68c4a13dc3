"""The synchronous client."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any, BinaryIO, TypeVar

from gateway.client.batches import (
    BatchOutcome,
    BatchRow,
    InferMany,
    InferOutcome,
    build_batch_request,
)
from gateway.client.calls import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    JOB_REQUEST_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    READY_POLL_S,
    ApiRequest,
    InferCall,
    ModelInfoCache,
    StreamDecoder,
    WaitForJob,
    build_job_path,
    build_json_request,
    build_model_path,
    build_submit_request,
    build_upload_request,
    check_stream_type,
    create_events_call,
    create_infer_call,
    create_load_call,
    create_unload_call,
    has_numpy,
    is_model_ready,
    parse_model_reply,
    parse_models_reply,
)
from gateway.client.connection import find_access
from gateway.client.errors import GatewayError
from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, ResponseDocument, decode_object
from gateway.client.results import InferResult, decode_result
from gateway.client.retries import Attempts, WaitForReady
from gateway.client.uploads import ModelSource, open_upload
from gateway.media_types import NDJSON

T = TypeVar("T")


class Client:
    """A client of a gateway. Threads may share it; nothing uses the network before the first call.

    Without arguments, `TRITON_GATEWAY_URL`, `TRITON_GATEWAY_KEY` and `TRITON_GATEWAY_CA` say what to use. A
    call and its repetitions take at most `timeout_s` seconds, which the gateway keeps as the deadline of an
    inference. Requests that were refused (429, 503), lost (502) or found no connection are sent again, up to
    `retries` times; the gateway's `Retry-After` says when. `arrays=False` returns lists in place of NumPy
    arrays. Every method raises `GatewayError`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        arrays: bool | None = None,
        proxy: str | None = None,
    ) -> None:
        from gateway.client.transport import Transport

        self._access = find_access(url, key, ca)
        self.url = self._access.address.base_url
        self.retry_count = 0  # requests that were sent again
        self._timeout_s = timeout_s
        self._retries = retries
        self._uses_arrays = has_numpy() if arrays is None else arrays
        self._proxy = proxy
        self._models = ModelInfoCache()
        self._transport = Transport(self._access, proxy)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        self._transport.close()

    def infer(
        self,
        model: str,
        value: Any = None,
        /,
        *,
        version: str | int = "",
        parameters: Mapping[str, Any] | None = None,
        classification: int = 0,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **inputs: Any,
    ) -> InferResult:
        """Run an inference with a value for the only required input, or with values by input name.

        A value is a text, a number, bytes, a path of a file, an image of Pillow, an array, or a list of
        these. Inputs whose names are those of arguments of this method are passed in a mapping, as `value`.
        """
        call = create_infer_call(
            model,
            value,
            inputs,
            version=version,
            parameters=parameters,
            classification=classification,
            headers=headers,
        )
        return self._infer(call, timeout_s)

    def _infer(self, call: InferCall, timeout_s: float | None) -> InferResult:
        attempts = self._start_attempts(timeout_s)
        info = self._find_info(call, attempts)
        accept = call.choose_accept(info, uses_arrays=self._uses_arrays)
        reply = self._send(call.build_request(accept, info), attempts)
        return decode_result(reply, info if self._uses_arrays else None)

    def infer_many(
        self,
        model: str,
        values: Iterable[Any],
        /,
        *,
        batch: int = 1,
        concurrency: int = 16,
        version: str | int = "",
        parameters: Mapping[str, Any] | None = None,
        classification: int = 0,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Generator[InferOutcome, None, None]:
        """Yield a result, or the `GatewayError`, for each value, in order.

        At most `concurrency` requests are in progress, each with `batch` values; if a batch fails because of
        one of its values, they are sent alone. Ending the iteration cancels the requests in progress. They
        run in a thread of their own, in which `values` is read as well.
        """
        from gateway.client.threads import iterate_async

        call = InferCall(
            model,
            version=str(version),
            parameters=parameters or {},
            classification=classification,
            headers=headers or {},
        )
        many = InferMany(call, values, batch, concurrency, timeout_s)
        return iterate_async(self._create_async_options(), lambda client: client.start_many(many))

    def stream(
        self,
        model: str,
        value: Any = None,
        /,
        *,
        version: str | int = "",
        parameters: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        **inputs: Any,
    ) -> Generator[InferResult, None, None]:
        """Yield each response of an inference as it arrives; the time limit is that of the next response.

        Ending the iteration cancels the inference. The inputs are those of `infer`.
        """
        call = create_infer_call(
            model, value, inputs, version=version, parameters=parameters, headers=headers
        )
        return self._stream(call, timeout_s)

    def _stream(
        self, call: InferCall, timeout_s: float | None
    ) -> Generator[InferResult, None, None]:
        attempts = self._start_attempts(timeout_s)
        info = self._find_info(call, attempts)
        request = call.build_request(NDJSON, info)
        with closing(self._retry(self._transport.open, request, attempts)) as reply:
            check_stream_type(reply.head)
            decoder = StreamDecoder(reply.head, info if self._uses_arrays else None, attempts)
            for data in reply.iter_bytes():
                yield from decoder.feed(data)
            yield from decoder.finish()

    def submit(
        self,
        model: str,
        value: Any = None,
        /,
        *,
        version: str | int = "",
        parameters: Mapping[str, Any] | None = None,
        classification: int = 0,
        headers: Mapping[str, str] | None = None,
        callback_url: str = "",
        **inputs: Any,
    ) -> dict[str, Any]:
        """Submit an inference as a job, and return the job's document, whose `id` the other methods take.

        The gateway calls `callback_url` when the job has ended. The inputs are those of `infer`.
        """
        call = create_infer_call(
            model,
            value,
            inputs,
            version=version,
            parameters=parameters,
            classification=classification,
            headers=headers,
        )
        attempts = self._start_attempts(None)
        info = self._find_info(call, attempts)
        accept = call.choose_accept(info, uses_arrays=self._uses_arrays)
        request = build_submit_request(call.build_request(accept, info), callback_url)
        return decode_object(self._send(request, attempts))

    def wait_job(self, job: str, timeout_s: float = OPERATION_TIMEOUT_S) -> dict[str, Any]:
        """Wait until a job has ended, and return its document."""
        wait = WaitForJob(job, timeout_s)
        while True:
            reply = self._call(wait.build_request(), timeout_s=JOB_REQUEST_TIMEOUT_S)
            document = decode_object(reply)
            if wait.is_over(document):
                return document

    def job_result(self, job: str, timeout_s: float = OPERATION_TIMEOUT_S) -> InferResult:
        """Wait until a job has ended, and return what `infer` would have returned or raise its error."""
        document = self.wait_job(job, timeout_s)
        attempts = self._start_attempts(None)
        reply = self._send(build_json_request("GET", f"{build_job_path(job)}/result"), attempts)
        info = self._find_info(InferCall(str(document.get("model", ""))), attempts)
        return decode_result(reply, info if self._uses_arrays else None)

    def cancel_job(self, job: str) -> dict[str, Any]:
        """Cancel a job, or delete one that has ended; return its document."""
        return decode_object(self._call(build_json_request("DELETE", build_job_path(job))))

    def submit_batch(
        self,
        model: str,
        rows: Iterable[BatchRow],
        *,
        callback_url: str = "",
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Submit many inferences as one job, and return the job's document.

        A row is a `custom_id` of your choice and a value, as for `infer`. Rows are read while they are sent.
        """
        request = build_batch_request(model, rows, callback_url)
        return decode_object(self._call(request, timeout_s=timeout_s, retries=0))

    def batch_results(self, job: str) -> Generator[BatchOutcome, None, None]:
        """Yield the `custom_id` of each row with its result or `GatewayError`, in order, as they end.

        It continues after a lost connection. A `GatewayError` is raised at the end if the job is not done.
        """
        from gateway.client.threads import iterate_async

        return iterate_async(self._create_async_options(), lambda client: client.batch_results(job))

    def model(self, name: str, version: str | int = "") -> ModelInfo:
        """Return the inputs, outputs and versions of a model."""
        path = build_model_path(name, str(version))
        return parse_model_reply(self._call(build_json_request("GET", path)))

    def models(self) -> list[ModelInfo]:
        """Return the models that the key may use, also those that are not loaded."""
        return parse_models_reply(self._call(build_json_request("GET", "/v1/models")))

    def load(self, name: str, *, timeout_s: float = OPERATION_TIMEOUT_S) -> dict[str, Any]:
        """Load a model on every replica; return the report of the replicas."""
        return decode_object(self._call(create_load_call(name), timeout_s=timeout_s))

    def unload(
        self, name: str, *, dependents: bool = False, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> dict[str, Any]:
        """Unload a model from every replica, also those an ensemble consists of; return the report."""
        request = create_unload_call(name, dependents=dependents)
        return decode_object(self._call(request, timeout_s=timeout_s))

    def events(self, since: str | datetime = "", *, limit: int = 100) -> dict[str, Any]:
        """Return the changes from a time on, or the last ones, as `events`, and where they go on, as `next`.

        `since` is a time, or the `next` of an earlier answer. The key needs the role admin.
        """
        return decode_object(self._call(create_events_call(since, limit)))

    def wait_ready(self, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until a replica can serve a model."""
        request = build_json_request("GET", build_model_path(name))
        wait = WaitForReady(name, timeout_s)
        while True:
            try:
                if is_model_ready(self._call(request, timeout_s=wait.remaining_s, retries=0)):
                    return
                wait.check_deadline()
            except GatewayError as exc:
                wait.check(exc)
            time.sleep(wait.choose_pause(READY_POLL_S))

    def push(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        name: str = "",
        version: str | int = "",
        config: str | os.PathLike[str] | None = None,
        labels: str | os.PathLike[str] | None = None,
        load: bool = True,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Upload a model file, archive or folder, and load it; return what the gateway stored."""
        upload = ModelSource(source, name, str(version), config=config, labels=labels, load=load)
        with open_upload(upload) as content:
            request = build_upload_request(upload, content)
            return decode_object(self._call(request, timeout_s=timeout_s, retries=0))

    def delete(self, name: str, version: str | int = "") -> None:
        """Unload a model, and remove its files or those of a version."""
        request = build_json_request("DELETE", build_model_path(name, str(version)))
        self._call(request, timeout_s=OPERATION_TIMEOUT_S)

    def request(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> ResponseDocument:
        """Call any path of the API, and return the JSON object of its response."""
        request = build_json_request(method, path, json, headers)
        reply = self._call(request, timeout_s=timeout_s, retries=retries)
        return ResponseDocument(reply.url, decode_object(reply) if reply.content else {})

    def download(
        self, path: str, *, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> Generator[bytes, None, None]:
        """Yield the body of a response as it arrives."""
        request = build_json_request("GET", path)
        attempts = self._start_attempts(timeout_s)
        with closing(self._retry(self._transport.open, request, attempts)) as reply:
            yield from reply.iter_bytes()

    def _call(
        self, request: ApiRequest, *, timeout_s: float | None = None, retries: int | None = None
    ) -> Reply:
        return self._send(request, self._start_attempts(timeout_s, retries=retries))

    def _start_attempts(self, timeout_s: float | None, *, retries: int | None = None) -> Attempts:
        return Attempts(
            self._timeout_s if timeout_s is None else timeout_s,
            self._retries if retries is None else retries,
        )

    def _find_info(self, call: InferCall, attempts: Attempts) -> ModelInfo | None:
        if not (self._uses_arrays or call.needs_name):
            return None
        now = time.monotonic()
        info = self._models.get(call.model, call.version, now)
        if info is None:
            path = build_model_path(call.model, call.version)
            info = parse_model_reply(self._send(build_json_request("GET", path), attempts))
            self._models.put(call.model, call.version, info, now)
        return info

    def _send(self, request: ApiRequest, attempts: Attempts) -> Reply:
        return self._retry(self._transport.read, request, attempts)

    def _retry(
        self,
        attempt: Callable[[ApiRequest, Attempts], T],
        request: ApiRequest,
        attempts: Attempts,
    ) -> T:
        while True:
            try:
                return attempt(request, attempts)
            except GatewayError as exc:
                delay_s = attempts.plan_retry(exc, is_repeatable=request.is_repeatable)
                if delay_s is None:
                    raise
                self.retry_count += 1
            time.sleep(delay_s)

    def _create_async_options(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "key": self._access.key,
            "ca": self._access.ca_file,
            "timeout_s": self._timeout_s,
            "retries": self._retries,
            "arrays": self._uses_arrays,
            "proxy": self._proxy,
        }
