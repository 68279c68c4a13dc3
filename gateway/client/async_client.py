"""The client, for asyncio. `client.py` is generated from this module: `make client`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from math import ceil
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from gateway.client.calls import (
    ApiRequest,
    InferCall,
    build_json_request,
    build_model_path,
    quote_part,
)
from gateway.client.connection import ClientOptions, find_options
from gateway.client.errors import CONNECTION_LOST, MODEL_NOT_READY, TIMEOUT, GatewayError
from gateway.client.jobs import (
    BatchOutcome,
    BatchRow,
    Job,
    build_job_path,
    create_batch_body,
    decode_row,
    is_batch_read,
    parse_job,
)
from gateway.client.many import InferMany, InferOutcome, call_blocking, collect, infer_many
from gateway.client.models import (
    ListedModel,
    ModelInfo,
    is_model_awaited,
    parse_model,
    parse_models,
)
from gateway.client.replies import LineBuffer, Reply, ResponseDocument, decode_object
from gateway.client.results import InferResult, decode_result
from gateway.client.retries import Attempts, can_retry
from gateway.client.uploads import ModelSource, find_model_name, open_body
from gateway.media_types import NDJSON

T = TypeVar("T")
# Loads and transfers of models.
OPERATION_TIMEOUT_S: Final = 600.0
READY_POLL_S: Final = 0.5
MODEL_INFO_TTL_S: Final = 60.0
MAX_KNOWN_MODELS: Final = 1000
# A request waits for less than the time limits of proxies, and is repeated.
JOB_WAIT_S: Final = 20
JOB_REQUEST_TIMEOUT_S: Final = 40.0


class AsyncClient:
    """A client of a gateway, for asyncio. Nothing uses the network before the first call.

    Without arguments, `TRITON_GATEWAY_URL`, `TRITON_GATEWAY_KEY` and `TRITON_GATEWAY_CA`, or else
    `GATEWAY_URL` and so on, say what to use. A call and its repetitions take at most `timeout_s` seconds,
    which the gateway keeps as the deadline of an inference. Requests that were refused (429, 503), lost
    (502) or found no connection are sent again, up to `retries` times; the gateway's `Retry-After` says
    when. `arrays=False` returns lists in place of NumPy arrays. Every method raises `GatewayError`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        timeout_s: float = ClientOptions.timeout_s,
        retries: int = ClientOptions.retries,
        arrays: bool | None = None,
        proxy: str | None = None,
    ) -> None:
        from gateway.client.async_transport import AsyncTransport

        self._options = replace(
            find_options(url, key, ca),
            timeout_s=timeout_s,
            retries=retries,
            arrays=find_spec("numpy") is not None if arrays is None else arrays,
            proxy=proxy,
        )
        self.url = self._options.url
        self.retry_count = 0  # requests that were sent again
        # Descriptions of models, which are read again after a while: a model may be loaded anew.
        self._models: dict[tuple[str, str], tuple[ModelInfo, float]] = {}
        self._transport = AsyncTransport(self._options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
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
        call = InferCall(
            model, value, inputs, version, parameters, classification, headers, timeout_s
        )
        return await self._infer(call.check_inputs())

    async def _infer(self, call: InferCall) -> InferResult:
        attempts = self._start_attempts(call.timeout_s)
        request, info = await self._build(call, attempts)
        reply = await self._send(request, attempts)
        return decode_result(reply, info, attempts.elapsed_s)

    def infer_many(
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
        stream: bool = False,
    ) -> AsyncGenerator[InferOutcome, None]:
        """Yield a result, or the `GatewayError`, for each value, in order.

        At most `concurrency` requests are in progress, each with `batch` values; if a batch fails because of
        one of its values, they are sent alone. Ending the iteration cancels the requests in progress.
        `values` may block: it is read in a thread of its own. With `stream`, a model may return any number
        of responses: each output is the list of its values in all of them.
        """
        call = InferCall(model, None, {}, version, parameters, classification, headers, timeout_s)
        infer = partial(collect, self._stream) if stream else self._infer
        return infer_many(infer, InferMany(call, values, batch, concurrency, stream))

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
        call = InferCall(model, value, inputs, version, parameters, 0, headers, timeout_s)
        return self._stream(call.check_inputs())

    async def _stream(self, call: InferCall) -> AsyncGenerator[InferResult, None]:
        attempts = self._start_attempts(call.timeout_s)
        request, info = await self._build(call, attempts, accept=NDJSON)
        async with aclosing(await self._open(request, attempts)) as response:
            async for line in self._transport.read_lines(response):
                yield decode_result(line, info, attempts.elapsed_s)

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
    ) -> Job:
        """Submit an inference as a job, which the other methods take.

        The gateway calls `callback_url` when the job has ended. The inputs are those of `infer`.
        """
        call = InferCall(model, value, inputs, version, parameters, classification, headers)
        attempts = self._start_attempts(None)
        request, _ = await self._build(call.check_inputs(), attempts)
        wanted = {**request.headers, "prefer": "respond-async", **name_callback(callback_url)}
        # Only the job's own limit ends it.
        request = replace(request, headers=wanted, has_deadline=False)
        reply = await self._send(request, attempts)
        return decode_object(reply).parse(parse_job)

    async def wait_job(self, job: Job | str, timeout_s: float = OPERATION_TIMEOUT_S) -> Job:
        """Wait until a job has ended, and return its last state."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(min(ceil(deadline - time.monotonic()), JOB_WAIT_S), 0)
            state = await self._read_job(job, f"?wait={wait_s}")
            if state.has_ended:
                return state
            if time.monotonic() >= deadline:
                message = f"job {state.id} is still {state.state} after {timeout_s:g} s"
                raise GatewayError(message, TIMEOUT)

    async def _read_job(self, job: Job | str, query: str = "") -> Job:
        path = f"{build_job_path(job)}{query}"
        document = await self.request("GET", path, timeout_s=JOB_REQUEST_TIMEOUT_S)
        return document.parse(parse_job)

    async def job_result(
        self, job: Job | str, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> InferResult:
        """Wait until a job has ended, and return what `infer` would have returned or raise its error."""
        ended = await self.wait_job(job, timeout_s)
        attempts = self._start_attempts(None)
        request = build_json_request("GET", f"{build_job_path(job)}/result")
        reply = await self._send(request, attempts)
        info = await self._find_info(InferCall(ended.model), attempts)
        return decode_result(reply, info, attempts.elapsed_s)

    async def cancel_job(self, job: Job | str) -> Job:
        """Cancel a job, or delete one that has ended; return its last state."""
        document = await self.request("DELETE", build_job_path(job))
        return document.parse(parse_job)

    async def submit_batch(
        self,
        model: str,
        rows: Iterable[BatchRow] | AsyncIterable[BatchRow],
        *,
        callback_url: str = "",
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> Job:
        """Submit many inferences as one job.

        A row is a `custom_id` of your choice and a value, as for `infer`. Rows are read while they are sent.
        """
        path = f"{build_model_path(model)}/jobs"
        headers = name_callback(callback_url)
        request = ApiRequest("POST", path, headers=headers, body=create_batch_body(rows))
        reply = await self._send(request, self._start_attempts(timeout_s, retries=0))
        return decode_object(reply).parse(parse_job)

    async def batch_results(self, job: Job | str) -> AsyncGenerator[BatchOutcome, None]:
        """Yield the `custom_id` of each row with its result or `GatewayError`, in order, as they end.

        It continues after a lost connection. A `GatewayError` is raised at the end if the job is not done.
        """
        path = build_job_path(job)
        state = await self._read_job(job)
        info = await self._find_info(InferCall(state.model), self._start_attempts(None))
        rows = 0
        while not is_batch_read(state, rows):
            first_row = rows
            lines = LineBuffer(path)
            result = self.download(f"{path}/result?after={rows}", timeout_s=JOB_REQUEST_TIMEOUT_S)
            async with aclosing(result):
                try:
                    async for data in result:
                        for line in lines.feed(data):
                            rows += 1
                            yield decode_row(line, path, info)
                except GatewayError as exc:
                    if exc.code not in (CONNECTION_LOST, TIMEOUT):
                        raise
            if state.has_ended and rows == first_row:
                raise GatewayError(f"job {state.id} is {state.state}, but its result is incomplete")
            state = await self._read_job(job, "?wait=1")

    async def model(self, name: str, version: str | int = "") -> ModelInfo:
        """Return the inputs, outputs and versions of a model."""
        return await self._describe(InferCall(name, version=version), self._start_attempts(None))

    async def models(self) -> list[ListedModel]:
        """Return the models that the key may use, also those that are not loaded, without their inputs."""
        document = await self.request("GET", "/v1/models")
        return document.parse(parse_models)

    async def load(self, name: str, *, timeout_s: float = OPERATION_TIMEOUT_S) -> dict[str, Any]:
        """Load a model on every replica; return the report of the replicas."""
        path = f"/v2/repository/models/{quote_part(name)}/load"
        return await self.request("POST", path, {}, timeout_s=timeout_s)

    async def unload(
        self, name: str, *, dependents: bool = False, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> dict[str, Any]:
        """Unload a model from every replica, also those an ensemble consists of; return the report."""
        path = f"/v2/repository/models/{quote_part(name)}/unload"
        document = {"parameters": {"unload_dependents": True}} if dependents else {}
        return await self.request("POST", path, document, timeout_s=timeout_s)

    async def events(
        self, since: str | datetime = "", *, after: str = "", limit: int = 100
    ) -> dict[str, Any]:
        """Return the changes from a time on, or the last ones, as `events`, and where they go on, as `next`.

        `after` is the `next` of an earlier answer, instead of a time. The key needs the role admin.
        """
        if isinstance(since, datetime):
            since = since.astimezone(timezone.utc).isoformat()
        query = urlencode({"since": since, "after": after, "limit": limit})
        return await self.request("GET", f"/v1/events?{query}")

    async def wait_ready(self, name: str, timeout_s: float = ClientOptions.timeout_s) -> None:
        """Wait until a replica can serve a model. Errors that time does not mend are raised at once."""
        deadline = time.monotonic() + timeout_s
        path = build_model_path(name)
        reason = ""
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                document = await self.request("GET", path, timeout_s=remaining_s, retries=0)
                if document.get("ready") is True:
                    return
                reason = ""
            except GatewayError as exc:
                if not can_retry(exc, is_repeatable=True) and exc.code != TIMEOUT:
                    raise
                reason = f": {exc}"
            await asyncio.sleep(min(READY_POLL_S, max(deadline - time.monotonic(), 0)))
        raise GatewayError(f"model {name} is not ready after {timeout_s:g} s{reason}", TIMEOUT)

    async def push(
        self,
        source: ModelSource,
        *,
        name: str = "",
        version: str | int = "",
        config: str | os.PathLike[str] | None = None,
        labels: str | os.PathLike[str] | None = None,
        load: bool = True,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Upload a model file, archive or folder, and load it; return what the gateway stored."""
        path = build_model_path(find_model_name(source, name), version)
        query = {} if load else {"load": "false"}
        opened = open_body(source, {"config": config, "labels": labels})
        with ExitStack() as stack:
            body = await call_blocking(stack.enter_context, opened)
            request = ApiRequest("PUT", path, query=query, body=body)
            reply = await self._send(request, self._start_attempts(timeout_s, retries=0))
            return decode_object(reply)

    async def delete(self, name: str, version: str | int = "") -> None:
        """Unload a model, and remove its files or those of a version."""
        await self.request("DELETE", build_model_path(name, version), timeout_s=OPERATION_TIMEOUT_S)

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
        """Call any path of the API, and return the JSON object of its response."""
        request = build_json_request(method, path, json, headers)
        reply = await self._send(request, self._start_attempts(timeout_s, retries))
        return decode_object(reply) if reply.content else ResponseDocument(reply.url, {})

    async def download(
        self, path: str, *, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body of a response as it arrives."""
        request = build_json_request("GET", path)
        response = await self._open(request, self._start_attempts(timeout_s))
        async with aclosing(response):
            async for data in self._transport.read_pieces(response):
                yield data

    def _start_attempts(self, timeout_s: float | None, retries: int | None = None) -> Attempts:
        return Attempts(
            self._options.timeout_s if timeout_s is None else timeout_s,
            self._options.retries if retries is None else retries,
        )

    async def _build(
        self, call: InferCall, attempts: Attempts, accept: str = ""
    ) -> tuple[ApiRequest, ModelInfo | None]:
        """Return a request, and the model if numbers become arrays."""
        info = await self._find_info(call, attempts)
        described = info
        if described is None and call.needs_name:
            described = await self._describe(call, attempts)
        accept = accept or call.choose_accept(info)
        # Reading and encoding files can take a while.
        request = await call_blocking(call.build_request, accept, described, is_slow=call.has_files)
        return request, info

    async def _find_info(self, call: InferCall, attempts: Attempts) -> ModelInfo | None:
        if not self._options.arrays:
            return None
        key = (call.model, str(call.version))
        info, expires_at = self._models.get(key, (None, 0.0))
        now = time.monotonic()
        if info is None or now >= expires_at:
            info = await self._describe(call, attempts)
            if len(self._models) >= MAX_KNOWN_MODELS:
                self._models.clear()
            self._models[key] = info, now + MODEL_INFO_TTL_S
        return info

    async def _describe(self, call: InferCall, attempts: Attempts) -> ModelInfo:
        reply = await self._send(call.build_model_request(), attempts)
        return decode_object(reply).parse(parse_model)

    async def _send(self, request: ApiRequest, attempts: Attempts) -> Reply:
        return await self._retry(self._transport.read, request, attempts)

    async def _open(self, request: ApiRequest, attempts: Attempts) -> Any:
        """Return the open response of httpx, whose import is left to the transport."""
        return await self._retry(self._transport.open, request, attempts)

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
                if delay_s is None or await self._is_hopeless(exc, request.call, attempts):
                    raise request.explain(exc) from exc.__cause__
                self.retry_count += 1
            await asyncio.sleep(delay_s)

    async def _is_hopeless(
        self, error: GatewayError, call: InferCall | None, attempts: Attempts
    ) -> bool:
        """Return whether the model is not loaded, and nobody loads it."""
        if error.code != MODEL_NOT_READY or call is None:
            return False
        is_awaited = partial(is_model_awaited, name=call.model, version=str(call.version))
        try:
            models = await self.request(
                "GET", "/v1/models", timeout_s=attempts.remaining_s, retries=0
            )
        except GatewayError:
            return False
        return not models.parse(is_awaited)


def name_callback(url: str) -> dict[str, str]:
    return {"x-callback-url": url} if url else {}
