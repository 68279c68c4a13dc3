"""The behaviours of Triton on which the gateway relies, asked with the gateway's own code.

The embedded Triton is asked, or the one at the address that `make test-triton TRITON=…` names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import SecretStr

from gateway import errors
from gateway.config.settings import Settings, read_settings
from gateway.errors import GatewayError
from gateway.fleet.discovery import create_tls_context
from gateway.fleet.index import STATE_RANKS
from gateway.fleet.probe import INDEX_PATH
from gateway.fleet.replica import Replica, parse_replica_url
from gateway.fleet.statistics import parse_statistics
from gateway.fleet.transports import HttpCall
from gateway.media_types import EVENT_STREAM
from gateway.messages import print_message
from gateway.telemetry.exposition import parse_families, split_page
from gateway.tensors.signature import build_signature
from gateway.triton.error_mapping import LoadFailed
from gateway.triton.grpc.byte_channel import is_model_response
from gateway.triton.grpc.management import build_load_request, build_unload_request
from gateway.triton.restricted_api import RestrictedApi
from gateway.triton.sequence import SequenceStep
from tests.support.conformance import (
    BROKEN,
    DECOUPLED,
    FAILURE,
    FAILURE_MESSAGE,
    IDENTITY,
    MAX_QUEUE_SIZE,
    MODEL,
    MODEL_PATH,
    QUEUED,
    STATEFUL,
    TARGET,
    VALUES,
    ObservedTriton,
    Variant,
    find_error,
)
from tests.support.fleet import write_echo
from tests.support.servers import COMPLETE_CONFIGS, BriefTriton, triton_with
from tests.support.wait import lengthening, wait_until_async

SECRET = RestrictedApi("secret-header", "the-secret-of-the-test")
UNKNOWN_MODEL = TARGET._replace(model=f"{MODEL}_unknown")
UNKNOWN_VERSION = TARGET._replace(version="7")
UNSTARTED_SEQUENCE = TARGET._replace(sequence_step=SequenceStep(7))
# Numbers of steps of the model, each of 50 ms.
BRIEF_STEPS = 4
LONG_STEPS = 100
STREAM_STEPS = 3
# Those of the dashboards, alerts, rules and autoscaling.
METRICS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_pending_request_count",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Settings]]:
    """The address of the Triton, and the settings with its secret and certificates."""
    if url := os.environ.get("TRITON"):
        yield url, read_settings()
        return
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "echo")
    arguments = (*COMPLETE_CONFIGS, "--strict-readiness=true")
    options = triton_with((folder,), ("echo",), arguments).options
    with BriefTriton(replace(options, restricted_api=SECRET), on_message=print_message) as triton:
        yield triton.options.url, Settings(triton_restricted_api=SecretStr(SECRET.setting))


@pytest.fixture(scope="module")
async def triton(served: tuple[str, Settings]) -> AsyncIterator[ObservedTriton]:
    url, settings = served
    address = parse_replica_url(url)
    triton = ObservedTriton(Replica(address, settings, create_tls_context(settings, [address])))

    async def observe() -> tuple[Any, ...]:
        """Return what the tests leave as it was: readiness and the models."""
        ready = await triton.request(b"GET", b"/v2/health/ready")
        return ready.status, (await triton.read_index()).models

    async def is_as_before() -> bool:
        return await observe() == before

    before = await observe()
    yield triton
    await find_error(triton.unload())
    await wait_until_async(is_as_before)
    triton.replica.close()


async def load_plain(triton: ObservedTriton) -> Variant:
    """Load the model without streams and sequences, if need be one for ONNX Runtime."""
    return await triton.load(QUEUED, IDENTITY)


async def assert_fails(
    triton: ObservedTriton, expected: type[GatewayError], words: str = "", **options: Any
) -> None:
    """Check that an inference fails in the same way over HTTP and gRPC."""
    for infer in (triton.infer_over_http, triton.infer_over_grpc):
        error = await find_error(infer(**options))
        assert isinstance(error, expected)
        assert words in error.detail


async def test_index_has_only_known_states(triton: ObservedTriton) -> None:
    assert (await triton.read_json("/v2"))["version"]
    index = await triton.read_index()
    assert index.state_counts.keys() <= STATE_RANKS.keys()


async def test_restricted_api_is_refused_without_its_secret(triton: ObservedTriton) -> None:
    if triton.replica.restricted_api is None:
        pytest.skip("GATEWAY_TRITON_RESTRICTED_API is not set")
    assert (await triton.request(b"POST", INDEX_PATH, has_secret=False)).status == 403
    unload = build_unload_request(UNKNOWN_MODEL.model, {})
    error = await find_error(triton.manage(unload, has_secret=False))
    assert isinstance(error, LoadFailed)
    assert "restricted" in error.detail


async def test_unknown_model_and_version_are_not_found(triton: ObservedTriton) -> None:
    await assert_fails(triton, errors.UnknownModel, target=UNKNOWN_MODEL)
    await load_plain(triton)
    await assert_fails(triton, errors.UnknownModel, target=UNKNOWN_VERSION)


async def test_signature_is_that_of_the_config(triton: ObservedTriton) -> None:
    expected = (await load_plain(triton)).signature
    metadata = await triton.read_json(MODEL_PATH)
    found = build_signature(metadata, await triton.read_json(f"{MODEL_PATH}/config"))
    for name in ("inputs", "outputs", "max_batch_size", "is_decoupled", "versions"):
        assert getattr(found, name) == getattr(expected, name), name


async def test_values_return_over_http_and_grpc(triton: ObservedTriton) -> None:
    await load_plain(triton)
    for infer in (triton.infer_over_http, triton.infer_over_grpc):
        assert np.array_equal((await infer()).outputs["RESULT"], VALUES)


async def test_wrong_input_is_refused(triton: ObservedTriton) -> None:
    await load_plain(triton)
    await assert_fails(triton, errors.InputMismatch, rows=2)
    path = f"{MODEL_PATH}/infer".encode()
    malformed = HttpCall(TARGET, b"POST", path, [(b"content-length", b"1")], b"{")
    error = await find_error(malformed.send(triton.replica, TARGET.timeout_s, None))
    assert isinstance(error, errors.MalformedRequest)


async def test_statistics_are_read(triton: ObservedTriton) -> None:
    await load_plain(triton)
    await triton.infer_over_http()
    response = await triton.request(b"GET", f"{MODEL_PATH}/stats".encode())
    (statistics,) = parse_statistics(response.body)
    assert statistics["inference_count"] > 0


async def test_metrics_of_a_loaded_model_are_complete(triton: ObservedTriton) -> None:
    await load_plain(triton)
    client = triton.replica.metrics
    response = await client.request(b"GET", b"/metrics", timeout_s=TARGET.timeout_s)
    with_model = {
        name
        for name, family in parse_families(split_page(response.body)).items()
        if any(f'model="{MODEL}"' in labels for _, labels, _ in family.samples)
    }
    assert with_model >= METRICS


async def test_failure_of_a_model_has_its_message(triton: ObservedTriton) -> None:
    await triton.load(QUEUED)
    await assert_fails(triton, errors.ModelFault, FAILURE_MESSAGE, steps=FAILURE)


async def test_full_queue_is_an_overload(triton: ObservedTriton) -> None:
    await triton.load(QUEUED)
    # One runs, and one may be chosen to run next, which leaves the queue.
    requests = (triton.infer_over_http(steps=BRIEF_STEPS) for _ in range(MAX_QUEUE_SIZE + 3))
    outcomes = await asyncio.gather(*map(find_error, requests))
    assert {type(outcome) for outcome in outcomes} == {type(None), errors.Overloaded}


async def test_model_stops_if_its_call_is_cancelled(triton: ObservedTriton) -> None:
    await triton.load(QUEUED)
    for pause_s in lengthening(0.1):
        running = asyncio.create_task(triton.infer_over_grpc(steps=LONG_STEPS))
        await asyncio.wait([running], timeout=pause_s)
        running.cancel()
        await asyncio.wait([running])
        if steps := (await triton.infer_over_http()).outputs["LAST_STEPS"].item():
            break  # the model had begun
    assert 0 < steps < LONG_STEPS


async def test_failed_load_has_its_reason_and_keeps_the_model(triton: ObservedTriton) -> None:
    await triton.load(QUEUED)
    error = await find_error(triton.manage(build_load_request(MODEL, BROKEN.load_parameters)))
    assert isinstance(error, LoadFailed)
    assert FAILURE_MESSAGE in error.detail
    assert np.array_equal((await triton.infer_over_http()).outputs["RESULT"], VALUES)


async def test_decoupled_model_streams_each_response(triton: ObservedTriton) -> None:
    await triton.load(DECOUPLED)
    await assert_fails(triton, errors.RefusedByModel, "is decoupled")
    messages = await triton.read_stream(STREAM_STEPS)
    assert list(map(is_model_response, messages)) == [True] * STREAM_STEPS
    error = await find_error(triton.read_stream(FAILURE))
    assert isinstance(error, errors.ModelFault)
    assert FAILURE_MESSAGE in error.detail


async def test_generate_stream_sends_events(triton: ObservedTriton) -> None:
    await triton.load(DECOUPLED)
    body = orjson.dumps({"VALUES": [1.5], "STEPS": STREAM_STEPS})
    response = await triton.request(b"POST", f"{MODEL_PATH}/generate_stream".encode(), body)
    assert response.header(b"content-type").decode().startswith(EVENT_STREAM)
    assert response.body.count(b"data: ") == STREAM_STEPS


async def test_step_without_a_start_is_refused(triton: ObservedTriton) -> None:
    await triton.load(STATEFUL)
    await assert_fails(triton, errors.SequenceNotRunning, target=UNSTARTED_SEQUENCE)


async def test_unloaded_model_is_not_ready(triton: ObservedTriton) -> None:
    await load_plain(triton)

    async def is_unready() -> bool:
        return (await triton.request(b"GET", f"{MODEL_PATH}/ready".encode())).status == 400

    await triton.unload()  # Triton responds before the model is unloaded
    await wait_until_async(is_unready)
    await assert_fails(triton, errors.ModelNotReady)
