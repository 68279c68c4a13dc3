"""The asynchronous client: the methods of `Client` as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, TypeVar

from gateway.client.batches import (
    BatchOutcome,
    BatchReader,
    BatchRow,
    InferMany,
    InferOutcome,
    InferOutcomes,
    OrderedTasks,
    build_batch_request,
    group_values,
    infer_batch,
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
from gateway.client.errors import CONNECTION_LOST, TIMEOUT, GatewayError
from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, ResponseDocument, decode_object
from gateway.client.results import InferResult, decode_result
from gateway.client.retries import Attempts, WaitForReady
from gateway.client.uploads import ModelSource, open_upload
from gateway.media_types import NDJSON

T = TypeVar("T")


class AsyncClient:
    """A client of a gateway for asyncio, with the arguments, results and errors of `Client`.

    Nothing uses the network before the first call.
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
        from gateway.client.transport import AsyncTransport

        self._access = find_access(url, key, ca)
        self.url = self._access.address.base_url
        self.retry_count = 0  # requests that were sent again
        self._timeout_s = timeout_s
        self._retries = retries
        self._uses_arrays = has_numpy() if arrays is None else arrays
        self._models = ModelInfoCache()
        self._transport = AsyncTransport(self._access, proxy)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def infer(
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
        return await self._infer(call, timeout_s)

    async def _infer(self, call: InferCall, timeout_s: float | None) -> InferResult:
        attempts = self._start_attempts(timeout_s)
        info = await self._find_info(call, attempts)
        accept = call.choose_accept(info, uses_arrays=self._uses_arrays)
        reply = await self._send(await self._build(call, accept, info), attempts)
        return decode_result(reply, info if self._uses_arrays else None)

    async def infer_many(
        self,
        model: str,
        values: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        batch: int = 1,
        concurrency: int = 16,
        version: str | int = "",
        parameters: Mapping[str, Any] | None = None,
        classification: int = 0,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[InferOutcome, None]:
        """Yield a result, or the `GatewayError`, for each value, in order: see `Client.infer_many`."""
        call = InferCall(
            model,
            version=str(version),
            parameters=parameters or {},
            classification=classification,
            headers=headers or {},
        )
        many = InferMany(call, values, batch, concurrency, timeout_s)
        outcomes = self.start_many(many)
        try:
            async for outcome in outcomes:
                yield outcome
        finally:
            await outcomes.aclose()

    def start_many(self, many: InferMany) -> InferOutcomes:
        """Return the outcomes, which must be closed to cancel what runs."""
        infer = partial(self._infer, timeout_s=many.timeout_s)
        groups = group_values(many.values, many.batch)
        tasks = OrderedTasks(partial(infer_batch, infer, many.call), groups, many.concurrency)
        return InferOutcomes(tasks)

    async def _build(self, call: InferCall, accept: str, info: ModelInfo | None) -> ApiRequest:
        if call.has_files:  # reading and encoding them can take a while
            return await asyncio.to_thread(call.build_request, accept, info)
        return call.build_request(accept, info)

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
    ) -> AsyncGenerator[InferResult, None]:
        """Yield each response of an inference as it arrives; the time limit is that of the next response.

        Ending the iteration cancels the inference. The inputs are those of `infer`.
        """
        call = create_infer_call(
            model, value, inputs, version=version, parameters=parameters, headers=headers
        )
        return self._stream(call, timeout_s)

    async def _stream(
        self, call: InferCall, timeout_s: float | None
    ) -> AsyncGenerator[InferResult, None]:
        attempts = self._start_attempts(timeout_s)
        info = await self._find_info(call, attempts)
        request = await self._build(call, NDJSON, info)
        async with aclosing(await self._retry(self._transport.open, request, attempts)) as reply:
            check_stream_type(reply.head)
            decoder = StreamDecoder(reply.head, info if self._uses_arrays else None, attempts)
            async for data in reply.iter_bytes():
                for result in decoder.feed(data):
                    yield result
            for result in decoder.finish():
                yield result

    async def submit(
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
        info = await self._find_info(call, attempts)
        accept = call.choose_accept(info, uses_arrays=self._uses_arrays)
        request = build_submit_request(await self._build(call, accept, info), callback_url)
        return decode_object(await self._send(request, attempts))

    async def wait_job(self, job: str, timeout_s: float = OPERATION_TIMEOUT_S) -> dict[str, Any]:
        wait = WaitForJob(job, timeout_s)
        while True:
            reply = await self._call(wait.build_request(), timeout_s=JOB_REQUEST_TIMEOUT_S)
            document = decode_object(reply)
            if wait.is_over(document):
                return document

    async def job_result(self, job: str, timeout_s: float = OPERATION_TIMEOUT_S) -> InferResult:
        document = await self.wait_job(job, timeout_s)
        attempts = self._start_attempts(None)
        reply = await self._send(
            build_json_request("GET", f"{build_job_path(job)}/result"), attempts
        )
        info = await self._find_info(InferCall(str(document.get("model", ""))), attempts)
        return decode_result(reply, info if self._uses_arrays else None)

    async def cancel_job(self, job: str) -> dict[str, Any]:
        return decode_object(await self._call(build_json_request("DELETE", build_job_path(job))))

    async def submit_batch(
        self,
        model: str,
        rows: Iterable[BatchRow] | AsyncIterable[BatchRow],
        *,
        callback_url: str = "",
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> dict[str, Any]:
        request = build_batch_request(model, rows, callback_url)
        return decode_object(await self._call(request, timeout_s=timeout_s, retries=0))

    async def batch_results(self, job: str) -> AsyncGenerator[BatchOutcome, None]:
        path = build_job_path(job)
        document = await self.request("GET", path)
        info = await self._find_info(InferCall(document["model"]), self._start_attempts(None))
        reader = BatchReader(job, info if self._uses_arrays else None)
        while not reader.is_complete(document):
            result = self.download(reader.start_connection(), timeout_s=JOB_REQUEST_TIMEOUT_S)
            async with aclosing(result) as pieces:
                try:
                    async for data in pieces:
                        for outcome in reader.feed(data):
                            yield outcome
                except GatewayError as exc:
                    if exc.code not in (CONNECTION_LOST, TIMEOUT):
                        raise
            document = await self.request("GET", f"{path}?wait=1")

    async def model(self, name: str, version: str | int = "") -> ModelInfo:
        path = build_model_path(name, str(version))
        return parse_model_reply(await self._call(build_json_request("GET", path)))

    async def models(self) -> list[ModelInfo]:
        return parse_models_reply(await self._call(build_json_request("GET", "/v1/models")))

    async def load(self, name: str, *, timeout_s: float = OPERATION_TIMEOUT_S) -> dict[str, Any]:
        return decode_object(await self._call(create_load_call(name), timeout_s=timeout_s))

    async def unload(
        self, name: str, *, dependents: bool = False, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> dict[str, Any]:
        request = create_unload_call(name, dependents=dependents)
        return decode_object(await self._call(request, timeout_s=timeout_s))

    async def events(self, since: str | datetime = "", *, limit: int = 100) -> dict[str, Any]:
        return decode_object(await self._call(create_events_call(since, limit)))

    async def wait_ready(self, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        request = build_json_request("GET", build_model_path(name))
        wait = WaitForReady(name, timeout_s)
        while True:
            try:
                if is_model_ready(await self._call(request, timeout_s=wait.remaining_s, retries=0)):
                    return
                wait.check_deadline()
            except GatewayError as exc:
                wait.check(exc)
            await asyncio.sleep(wait.choose_pause(READY_POLL_S))

    async def push(
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
        upload = ModelSource(source, name, str(version), config=config, labels=labels, load=load)
        with ExitStack() as stack:
            content = await asyncio.to_thread(stack.enter_context, open_upload(upload))
            request = build_upload_request(upload, content)
            return decode_object(await self._call(request, timeout_s=timeout_s, retries=0))

    async def delete(self, name: str, version: str | int = "") -> None:
        request = build_json_request("DELETE", build_model_path(name, str(version)))
        await self._call(request, timeout_s=OPERATION_TIMEOUT_S)

    async def request(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> ResponseDocument:
        request = build_json_request(method, path, json, headers)
        reply = await self._call(request, timeout_s=timeout_s, retries=retries)
        return ResponseDocument(reply.url, decode_object(reply) if reply.content else {})

    async def download(
        self, path: str, *, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> AsyncGenerator[bytes, None]:
        request = build_json_request("GET", path)
        attempts = self._start_attempts(timeout_s)
        async with aclosing(await self._retry(self._transport.open, request, attempts)) as reply:
            async for data in reply.iter_bytes():
                yield data

    async def _call(
        self, request: ApiRequest, *, timeout_s: float | None = None, retries: int | None = None
    ) -> Reply:
        return await self._send(request, self._start_attempts(timeout_s, retries=retries))

    def _start_attempts(self, timeout_s: float | None, *, retries: int | None = None) -> Attempts:
        return Attempts(
            self._timeout_s if timeout_s is None else timeout_s,
            self._retries if retries is None else retries,
        )

    async def _find_info(self, call: InferCall, attempts: Attempts) -> ModelInfo | None:
        if not (self._uses_arrays or call.needs_name):
            return None
        now = time.monotonic()
        info = self._models.get(call.model, call.version, now)
        if info is None:
            path = build_model_path(call.model, call.version)
            info = parse_model_reply(await self._send(build_json_request("GET", path), attempts))
            self._models.put(call.model, call.version, info, now)
        return info

    async def _send(self, request: ApiRequest, attempts: Attempts) -> Reply:
        return await self._retry(self._transport.read, request, attempts)

    async def _retry(
        self,
        attempt: Callable[[ApiRequest, Attempts], Awaitable[T]],
        request: ApiRequest,
        attempts: Attempts,
    ) -> T:
        while True:
            try:
                return await attempt(request, attempts)
            except GatewayError as exc:
                delay_s = attempts.plan_retry(exc, is_repeatable=request.is_repeatable)
                if delay_s is None:
                    raise
                self.retry_count += 1
            await asyncio.sleep(delay_s)
