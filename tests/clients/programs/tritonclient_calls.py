"""tritonclient of any version: HTTP and gRPC, sync and aio."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import partial
from queue import Empty, Queue
from typing import Any

import numpy as np

from tests.clients.programs.outcomes import Call, Responses, Target, print_outcomes, to_json

SHAPE = (1, 16)
FIRST = np.arange(16, dtype=np.int32).reshape(SHAPE)
SECOND = np.full(SHAPE, -1, dtype=np.int32)
FIRST_TEXTS = np.array([[str(number).encode() for number in range(16)]], dtype=object)
SECOND_TEXTS = np.full(SHAPE, b"1", dtype=object)
SCORES = np.array([[0.1, 0.7, 0.2]], np.float32)
WAIT_S = 10


class Variant:
    """One of the four clients of the package: the same calls, with the arguments that it takes."""

    def __init__(self, protocol: str, is_aio: bool, target: Target) -> None:
        self.is_http = protocol == "http"
        self.is_aio = is_aio
        self.types = importlib.import_module(f"tritonclient.{protocol}")
        name = f"tritonclient.{protocol}.aio" if is_aio else f"tritonclient.{protocol}"
        self._client_type = importlib.import_module(name).InferenceServerClient
        self._address = target.http if self.is_http else target.grpc
        self._client: Any = None
        self.headers = target.headers
        self.own_model = target.own_model

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = self._client_type(self._address)
        return self._client

    def close(self) -> Any:
        return self._client.close()

    def input(self, name: str, values: Any, datatype: str, binary: bool = True) -> Any:
        tensor = self.types.InferInput(name, list(values.shape), datatype)
        more = {"binary_data": binary} if self.is_http else {}
        tensor.set_data_from_numpy(values, **more)
        return tensor

    def output(self, name: str, binary: bool = True, classes: int = 0) -> Any:
        more = {"binary_data": binary} if self.is_http else {}
        return self.types.InferRequestedOutput(name, class_count=classes, **more)

    def numbers(self, binary: bool = True) -> list[Any]:
        pairs = (("INPUT0", FIRST), ("INPUT1", SECOND))
        return [self.input(name, values, "INT32", binary) for name, values in pairs]

    def texts(self, binary: bool = True) -> list[Any]:
        pairs = (("INPUT0", FIRST_TEXTS), ("INPUT1", SECOND_TEXTS))
        return [self.input(name, values, "BYTES", binary) for name, values in pairs]

    def infer(self, model: str, inputs: list[Any], **more: Any) -> Any:
        return self.client.infer(model, inputs, **{"headers": dict(self.headers), **more})

    def call(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Another method than `infer`; gRPC's clients return messages if nothing else is asked for."""
        function = getattr(self.client, method)
        if not self.is_http and "as_json" in inspect.signature(function).parameters:
            more["as_json"] = True
        return function(*arguments, **{"headers": dict(self.headers), **more})


async def value_of(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def list_calls(target: Target) -> Iterator[Call]:
    for protocol in ("http", "grpc"):
        for is_aio in (False, True):
            try:
                variant = Variant(protocol, is_aio, target)
            except ImportError:  # older than the clients of asyncio
                continue
            prefix = f"{protocol} aio" if is_aio else protocol
            for name, call in (
                *server_calls(variant),
                *infer_calls(variant),
                *refused_calls(variant),
                *management_calls(variant),
                *calls_with_one_dict(variant),
                *calls_of_one_client(variant),
            ):
                yield f"{prefix}: {name}", call
            yield f"unload by {prefix}", partial(unload, variant)
            yield f"{prefix}: close", variant.close


def server_calls(at: Variant) -> Iterator[Call]:
    yield "live", lambda: at.call("is_server_live")
    yield "ready", lambda: at.call("is_server_ready")
    yield "server metadata", lambda: at.call("get_server_metadata")
    for model, version in (
        ("simple", ""), ("simple", "1"), ("simple", "9"), ("simple", "x"),
        ("unknown", ""), ("never_loaded", ""),
    ):  # fmt: skip
        for method in ("is_model_ready", "get_model_metadata", "get_model_config"):
            words = method.replace("get_", "").replace("is_", "").replace("_", " ")
            yield (
                f"{words} of {model} {version}".strip(),
                partial(at.call, method, model, version),
            )
    yield "statistics of unknown", lambda: at.call("get_inference_statistics", "unknown")
    yield "statistics of simple 9", lambda: at.call("get_inference_statistics", "simple", "9")
    yield "statistics count inferences", lambda: count_inferences(at)


async def count_inferences(at: Variant) -> dict[str, Any]:
    """What three inferences add to the statistics. Triton counts one some time after it answered."""

    async def read() -> dict[str, int]:
        answer = await value_of(at.call("get_inference_statistics", "simple"))
        (entry,) = answer["model_stats"]
        counts = {name: int(entry.get(name, 0)) for name in ("inference_count", "execution_count")}
        success = entry["inference_stats"].get("success", {})
        return {**counts, "success": int(success.get("count", 0)), "version": int(entry["version"])}

    before = await read()
    for _ in range(3):
        await value_of(at.infer("simple", at.numbers()))
    for _ in range(50):
        after = await read()
        # It counts the execution at another time than the success.
        if all(after[name] >= before[name] + 3 for name in ("success", "execution_count")):
            break
        await asyncio.sleep(0.02)
    return {name: after[name] - before[name] for name in before}


def infer_calls(at: Variant) -> Iterator[Call]:
    forms = {"binary": True, "JSON": False} if at.is_http else {"binary": True}
    for form, binary in forms.items():
        yield f"infer {form}", partial(at.infer, "simple", at.numbers(binary))
        yield (
            f"infer {form} and outputs",
            partial(
                at.infer,
                "simple",
                at.numbers(binary),
                outputs=[at.output("OUTPUT1", not binary), at.output("OUTPUT0", binary)],
                request_id="mine",
            ),
        )
        yield f"infer BYTES {form}", partial(at.infer, "texts", at.texts(binary))
    yield "infer version 1", lambda: at.infer("simple", at.numbers(), model_version="1")
    yield (
        "classification",
        lambda: at.infer(
            "classes", [at.input("X", SCORES, "FP32")], outputs=[at.output("SCORES", classes=2)]
        ),
    )
    yield (
        "priority and timeout",
        lambda: at.infer("simple", at.numbers(), priority=1, timeout=10_000_000),
    )
    yield "sequence", lambda: count_steps(at)
    for algorithm in ("gzip", "deflate"):
        if at.is_http:
            more = {
                "request_compression_algorithm": algorithm,
                "response_compression_algorithm": algorithm,
            }
        else:
            more = {"compression_algorithm": algorithm}
        yield f"infer {algorithm}", partial(at.infer, "simple", at.numbers(), **more)


async def count_steps(at: Variant) -> list[Any]:
    """A sequence of three steps; its model counts them."""
    counts = []
    for step in range(3):
        result = await value_of(
            at.infer(
                "counting",
                [at.input("X", np.array([[step]], np.int32), "INT32")],
                outputs=[at.output("COUNT")],
                sequence_id=4_000 + at.is_http * 2 + at.is_aio,
                sequence_start=step == 0,
                sequence_end=step == 2,
            )
        )
        counts.append(to_json(result.as_numpy("COUNT")))
    return counts


def refused_calls(at: Variant) -> Iterator[Call]:
    numbers = np.zeros(SHAPE, np.int32)
    yield "infer unknown model", lambda: at.infer("unknown", at.numbers())
    yield "infer model that is not loaded", lambda: at.infer("never_loaded", at.numbers())
    for version in ("9", "x"):
        yield (
            f"infer version {version}",
            partial(at.infer, "simple", at.numbers(), model_version=version),
        )
    inputs: dict[str, list[Any]] = {
        "wrong datatype": [
            at.input("INPUT0", numbers.astype(np.float32), "FP32"),
            at.numbers()[1],
        ],
        "wrong shape": [
            at.input("INPUT0", np.zeros((1, 3), np.int32), "INT32"),
            at.numbers()[1],
        ],
        "too large a batch": [
            at.input(name, np.zeros((9, 16), np.int32), "INT32") for name in ("INPUT0", "INPUT1")
        ],
        "no batch": [
            at.input(name, np.zeros(16, np.int32), "INT32") for name in ("INPUT0", "INPUT1")
        ],
        "missing input": at.numbers()[:1],
        "unknown input": [at.input("NO_INPUT", numbers, "INT32"), *at.numbers()],
        "no input": [],
    }
    for name, tensors in inputs.items():
        yield f"infer {name}", partial(at.infer, "simple", tensors)
    yield (
        "infer unknown output",
        lambda: at.infer("simple", at.numbers(), outputs=[at.output("NO_OUTPUT")]),
    )
    yield (
        "classification of numbers without labels",
        lambda: at.infer("simple", at.numbers(), outputs=[at.output("OUTPUT0", classes=2)]),
    )
    yield (
        "infer model that fails",
        lambda: at.infer("failing", [at.input("X", np.ones((1, 1), np.float32), "FP32")]),
    )
    yield "infer decoupled model", lambda: at.infer("ticking", ticks(at, 1))
    yield (
        "step of no sequence",
        lambda: at.infer(
            "counting", [at.input("X", np.zeros((1, 1), np.int32), "INT32")], sequence_id=77
        ),
    )


def management_calls(at: Variant) -> Iterator[Call]:
    yield "index", lambda: sorted_index(at)
    yield "load", lambda: at.call("load_model", "simple")
    yield "load unknown", lambda: at.call("load_model", "unknown")
    yield "unload unknown", lambda: at.call("unload_model", "unknown")
    yield "load with a config", lambda: load_with_config(at)
    yield (
        "load with a config that is no JSON",
        lambda: at.call("load_model", at.own_model, config="{"),
    )
    for method, *arguments in (
        ("get_trace_settings", "simple"),
        ("get_trace_settings", "unknown"),
        ("update_trace_settings", "simple", {"trace_rate": "1000"}),
        ("get_log_settings",),
        ("update_log_settings", {"log_verbose_level": 0}),
        ("get_system_shared_memory_status",),
        ("get_cuda_shared_memory_status",),
        ("register_system_shared_memory", "region", "/region", 64),
        ("unregister_system_shared_memory",),
        ("unregister_cuda_shared_memory",),
    ):
        if hasattr(at._client_type, method):
            yield (
                " ".join([method.replace("_", " "), *map(str, arguments[:1])]),
                partial(at.call, method, *arguments),
            )


async def sorted_index(at: Variant) -> list[Any]:
    answer = await value_of(at.call("get_model_repository_index"))
    return sorted(answer["models"] if isinstance(answer, dict) else answer, key=str)


async def load_with_config(at: Variant) -> Any:
    config = await value_of(at.call("get_model_config", at.own_model))
    text = json.dumps(config.get("config", config))
    return await value_of(at.call("load_model", at.own_model, config=text))


async def unload(at: Variant) -> list[Any]:
    """A model that is unloaded is not ready, and can be loaded again."""
    seen = [await value_of(at.call("unload_model", at.own_model))]
    seen.append(await value_of(at.call("is_model_ready", at.own_model)))
    seen.append(await value_of(at.call("load_model", at.own_model)))
    seen.append(await value_of(at.call("is_model_ready", at.own_model)))
    return seen


def calls_with_one_dict(at: Variant) -> Iterator[Call]:
    """A program that gives one dict of headers to all its calls; some versions add to it."""
    headers = dict(at.headers)
    yield "one dict: infer", lambda: at.infer("simple", at.numbers(), headers=headers)
    for method, *arguments in (
        ("is_server_live",),
        ("is_server_ready",),
        ("is_model_ready", "simple"),
        ("get_server_metadata",),
        ("get_model_metadata", "simple"),
        ("get_model_config", "simple"),
        ("get_trace_settings",),
        ("get_system_shared_memory_status",),
        ("load_model", "simple"),
    ):
        yield (
            " ".join(["one dict:", *method.split("_"), *arguments]),
            partial(at.call, method, *arguments, headers=headers),
        )
    yield (
        "one dict: infer JSON",
        lambda: at.infer(
            "simple",
            at.numbers(binary=False),
            outputs=[at.output("OUTPUT0", binary=False)],
            headers=headers,
        ),
    )
    yield "one dict: infer again", lambda: at.infer("simple", at.numbers(), headers=headers)


def calls_of_one_client(at: Variant) -> Iterator[Call]:
    """What only one of the four clients has."""
    if at.is_http and not at.is_aio:
        yield (
            "async infer",
            lambda: at.client.async_infer(
                "simple", at.numbers(), headers=dict(at.headers)
            ).get_result(),
        )
        yield (
            "async infer unknown model",
            lambda: at.client.async_infer(
                "unknown", at.numbers(), headers=dict(at.headers)
            ).get_result(),
        )
    if at.is_http:
        return
    if not at.is_aio:
        yield "async infer", lambda: infer_with_callback(at, "simple")
        yield "async infer unknown model", lambda: infer_with_callback(at, "unknown")
    for name, requests in stream_requests(at).items():
        if at.is_aio:
            yield f"stream {name}", partial(stream_aio, at, requests)
        else:
            yield f"stream {name}", partial(stream, at, requests)


def infer_with_callback(at: Variant, model: str) -> Any:
    results: Queue[Any] = Queue()
    at.client.async_infer(
        model,
        at.numbers(),
        lambda result, error: results.put(result if error is None else error),
        headers=dict(at.headers),
    )
    result = results.get(timeout=WAIT_S)
    if isinstance(result, Exception):
        raise result
    return result


def ticks(at: Variant, count: int) -> list[Any]:
    return [
        at.input("COUNT", np.array([count], np.int32), "INT32"),
        at.input("SECONDS", np.array([0.01], np.float32), "FP32"),
    ]


def stream_requests(at: Variant) -> dict[str, list[dict[str, Any]]]:
    """Streams: the requests of each, and how many responses each has; None if a final flag ends them."""

    def ticking(count: int, **more: Any) -> dict[str, Any]:
        return {"model_name": "ticking", "inputs": ticks(at, count), "request_id": "t", **more}

    simple = {"model_name": "simple", "inputs": at.numbers(), "request_id": "s", "expected": 1}
    final = {"enable_empty_final_response": True, "expected": None}
    wrong = [at.input("COUNT", np.array([1.0], np.float32), "FP32"), ticks(at, 1)[1]]
    streams = {
        "of simple": [simple, simple],
        "of decoupled": [ticking(3, expected=3)],
        "of decoupled that fails": [ticking(-2, expected=3)],
        "of decoupled that begins with an error": [ticking(1, expected=1) | {"inputs": wrong}],
        "of unknown model": [simple | {"model_name": "unknown", "request_id": "u"}],
        "of version 9": [ticking(1, expected=1, model_version="9")],
        "of version x": [ticking(1, expected=1, model_version="x")],
        "of model that is not loaded": [simple | {"model_name": "never_loaded"}],
        "of wrong shape": [
            simple | {"inputs": [at.input("INPUT0", np.zeros((1, 3), np.int32), "INT32")]}
        ],
    }
    method = at.client.stream_infer if at.is_aio else at.client.async_stream_infer
    # The client of asyncio ignores this option.
    if not at.is_aio and "enable_empty_final_response" in inspect.signature(method).parameters:
        streams |= {
            "of simple with final response": [simple | final | {"expected": 1}],
            "of decoupled with final response": [ticking(2, **final)],
            "of decoupled without responses": [ticking(0, **final)],
            "of decoupled that fails with final response": [ticking(-1, **final)],
            "of decoupled that begins with an error with final response": [
                ticking(1, **final) | {"inputs": wrong}
            ],
            "of unknown model with final response": [
                simple | final | {"model_name": "unknown", "expected": 1}
            ],
        }
    return streams


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def describe_response(result: Any, error: Any) -> Any:
    """A response without the time that it was made at."""
    if error is not None:
        return error
    response = to_json(result)
    response["outputs"] = [each for each in response["outputs"] if each["name"] != "MADE"]
    return response


LAST = {"model_name": "simple", "request_id": "last"}  # what comes before its response is all


def ends(expected: int | None, result: Any, error: Any, count: int) -> bool:
    if expected is not None:
        return count >= expected
    return error is not None or is_final(result)


def stream(at: Variant, requests: list[dict[str, Any]]) -> Responses:
    responses: Queue[tuple[Any, Any]] = Queue()
    seen = Responses()
    at.client.start_stream(
        lambda result, error: responses.put((result, error)), headers=dict(at.headers)
    )
    try:
        for request in requests:
            options = dict(request)
            expected = options.pop("expected")
            at.client.async_stream_infer(**options)
            result, error = None, None
            count = 0
            while not count or not ends(expected, result, error, count):
                result, error = responses.get(timeout=WAIT_S)
                count += 1
                seen.append(describe_response(result, error))
        at.client.async_stream_infer(inputs=at.numbers(), **LAST)
        while True:
            result, error = responses.get(timeout=WAIT_S)
            if result is not None and result.get_response().id == "last":
                return seen
            seen.append(describe_response(result, error))
    except Empty:
        return Responses([*seen, "no further response"])
    finally:
        at.client.stop_stream()


async def stream_aio(at: Variant, requests: list[dict[str, Any]]) -> Responses:
    ended = asyncio.Event()
    last = {**LAST, "inputs": at.numbers()}

    async def send() -> Any:
        for request in requests:
            yield {name: value for name, value in request.items() if name != "expected"}
        await asyncio.wait_for(ended.wait(), WAIT_S)
        yield last

    seen = Responses()
    expected = sum(request["expected"] for request in requests)
    async for result, error in at.client.stream_infer(send(), headers=dict(at.headers)):
        if result is not None and result.get_response().id == "last":
            break
        seen.append(describe_response(result, error))
        if len(seen) >= expected:
            ended.set()
    return seen


if __name__ == "__main__":
    print_outcomes(list_calls)
