"""The behaviours of a running Triton on which the gateway relies, asked with the gateway's own code.

They are asked with a model that is loaded for it, under a name of its own, and unloaded at the end.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from gateway import errors
from gateway.capabilities.capability import FAILED, OK, WARNING, Finding
from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import Settings, read_settings
from gateway.doctor.checks import find_addresses
from gateway.errors import GatewayError, ModelControlModeConflict
from gateway.fleet.discovery import create_tls_context, parse_replica_source
from gateway.fleet.index import STATE_RANKS, Index
from gateway.fleet.probe import INDEX_PATH, PROBE_STATUS_REASONS, parse_index_response
from gateway.fleet.replica import Replica
from gateway.fleet.statistics import parse_statistics
from gateway.fleet.transports import (
    FailedResponse,
    GrpcStreamCall,
    GrpcUnaryCall,
    HttpCall,
    decode_json,
    prepare_http_infer,
    triton_model_path,
)
from gateway.http_client.client import CompleteResponse
from gateway.media_types import EVENT_STREAM
from gateway.messages import CommandError, join_names
from gateway.telemetry.exposition import parse_families, split_page
from gateway.tensors.inputs import InferInputs
from gateway.tensors.sequence import SequenceStep
from gateway.tensors.signature import Signature, build_signature
from gateway.triton.error_mapping import LoadFailed
from gateway.triton.grpc import byte_channel
from gateway.triton.grpc.management import (
    build_load_request,
    build_unload_request,
    call_management_api,
)
from gateway.triton.grpc.messages import encode_grpc_request
from gateway.triton.inference import InferRequest, InferResponse, decode_http_response
from gateway.triton.request_target import RequestTarget

MODEL: Final = "triton_gateway_conformance"
MODEL_PATH: Final = triton_model_path(MODEL)
TARGET: Final = RequestTarget(MODEL, timeout_s=10.0)
UNKNOWN_MODEL: Final = TARGET._replace(model=f"{MODEL}_unknown")
UNKNOWN_VERSION: Final = TARGET._replace(version="7")
UNSTARTED_SEQUENCE: Final = TARGET._replace(sequence_step=SequenceStep(7))
LOAD_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.1
UNLOAD_POLLS: Final = 300  # Triton responds before the model is unloaded
# A request that was sent is running after this time.
START_S: Final = 0.4
VALUES: Final = np.array([[1.5, -2.25, 0.0]], np.float32)
# Numbers of steps of the model: so many that other requests come before their end.
LONG_STEPS: Final = 30
STREAM_STEPS: Final = 3
FAILURE: Final = -1
FAILURE_MESSAGE: Final = "it was made to fail"
# Those of the dashboards, alerts, rules and autoscaling.
METRICS: Final = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_pending_request_count",
)
NOT_EXPLICIT: Final = "Triton does not run with --model-control-mode=explicit"
NO_BACKEND: Final = re.compile(r"unable to find .*(?:backend|lib)", re.I)


@dataclass(frozen=True)
class Variant:
    """The model with one config: the parameters of its load, and the signature that Triton must describe."""

    backend: str
    load_parameters: dict[str, Any]
    signature: Signature


def build_variant(backend: str, path: str, content: bytes, **options: Any) -> Variant:
    sides = {"input": [("VALUES", "FP32", -1)], "output": [("RESULT", "FP32", -1)]}
    if backend == "python":
        sides["input"].append(("STEPS", "INT32", 1))
        sides["output"].append(("LAST_STEPS", "INT32", 1))
    group = [{"count": 1, "kind": "KIND_CPU"}]
    config = {"backend": backend, "max_batch_size": 1, "instance_group": group, **options}
    metadata: dict[str, Any] = {"name": MODEL, "versions": ["1"]}
    for side, tensors in sides.items():
        config[side] = [
            {"name": name, "data_type": f"TYPE_{datatype}", "dims": [size]}
            for name, datatype, size in tensors
        ]
        metadata[f"{side}s"] = [
            {"name": name, "datatype": datatype, "shape": [-1, size]}
            for name, datatype, size in tensors
        ]
    parameters = {"config": config, f"file:{path}": base64.b64encode(content).decode()}
    return Variant(backend, parameters, build_signature(metadata, config))


SOURCE: Final = Path(__file__).with_name("conformance_model.py").read_bytes()
build_python_variant: Final = partial(build_variant, "python", "1/model.py")
MAX_QUEUE_SIZE: Final = 2
QUEUED: Final = build_python_variant(
    SOURCE, dynamic_batching={"default_queue_policy": {"max_queue_size": MAX_QUEUE_SIZE}}
)
DECOUPLED: Final = build_python_variant(SOURCE, model_transaction_policy={"decoupled": True})
STATEFUL: Final = build_python_variant(
    SOURCE, sequence_batching={"max_sequence_idle_microseconds": 60_000_000}
)
BROKEN: Final = build_python_variant(f"raise ValueError('{FAILURE_MESSAGE}')\n".encode())
# An ONNX graph that returns its input, for a Triton without the Python backend.
GRAPH: Final = (
    "CAcSADpXChoKBlZBTFVFUxIGUkVTVUxUIghJZGVudGl0eRIBZ1oaCgZWQUxVRVMSEAoOCAESCgoDEgFiCgMSAW5iGgoG"
    "UkVTVUxUEhAKDggBEgoKAxIBYgoDEgFuQgQKABAN"
)
IDENTITY: Final = build_variant("onnxruntime", "1/model.onnx", base64.b64decode(GRAPH))


class Difference(Exception):
    """Triton behaves in another way than the gateway expects. The message says how."""


class NotAsked(Exception):
    """The behaviour cannot be asked. The message says why."""


class Examination:
    """A Triton, and the variant of the model that it was asked to load."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.variant = QUEUED

    async def request(
        self, method: bytes, path: bytes, body: bytes = b"", *, has_secret: bool = True
    ) -> CompleteResponse:
        headers = self.replica.management_headers if has_secret else []
        return await self.replica.http.request(
            method, path, body=body, headers=headers, timeout_s=TARGET.timeout_s, fresh=True
        )

    async def read_json(self, path: str) -> Any:
        return decode_json((await self.request(b"GET", path.encode())).body)

    async def read_index(self) -> Index:
        response = await self.request(b"POST", INDEX_PATH)
        if response.status != 200:
            reason = PROBE_STATUS_REASONS.get(response.status, f"status {response.status}")
            raise Difference(reason)
        return await parse_index_response(response.body)

    async def observe(self) -> tuple[Any, ...]:
        """Return what must be the same before and after: readiness and the models."""
        ready = (await self.request(b"GET", b"/v2/health/ready")).status
        return ready, (await self.read_index()).models

    async def manage(self, message: Any, *, has_secret: bool = True) -> None:
        replica = self.replica
        metadata = replica.management_metadata if has_secret else ()
        target = replica.address.grpc_target
        await call_management_api(target, message, LOAD_TIMEOUT_S, replica.grpc_tls, metadata)

    async def load(self, variant: Variant) -> None:
        self.variant = variant
        await self.manage(build_load_request(MODEL, variant.load_parameters))

    def build_request(
        self, steps: int = 0, target: RequestTarget = TARGET, rows: int = 1
    ) -> InferRequest:
        signature = self.variant.signature
        counts = np.full((rows, 1), steps, np.int32)
        arrays = {"VALUES": np.repeat(VALUES, rows, axis=0), "STEPS": counts}
        inputs = InferInputs({name: arrays[name] for name in signature.inputs})
        deadline = asyncio.get_running_loop().time() + target.timeout_s
        return InferRequest(target, signature, inputs, (), {}, "", deadline, [])

    async def infer_over_http(self, **options: Any) -> InferResponse:
        call = await prepare_http_infer(self.build_request(**options), [])
        response = await call.send(self.replica, TARGET.timeout_s, None)
        return await decode_http_response(await response.read_complete())

    async def infer_over_grpc(self, **options: Any) -> InferResponse:
        call = GrpcUnaryCall(self.build_request(**options))
        return await call.send(self.replica, TARGET.timeout_s, None)

    async def read_stream(self, steps: int) -> list[bytes]:
        """Return the messages of a stream. Raises `FailedResponse` for an error of the model."""
        request = self.build_request(steps)
        message = encode_grpc_request(request, request.remaining_s)
        call = GrpcStreamCall(TARGET, byte_channel.STREAM_METHOD, message)
        stream = await call.send(self.replica, TARGET.timeout_s, None)
        messages = []
        try:
            while (received := await stream.read_message(TARGET.timeout_s)) is not None:
                messages.append(received)
        finally:
            stream.close()
        return messages


# Returns what was seen. Raises `Difference`, `NotAsked`, `GatewayError`, or an error of parsing.
Question = Callable[[Examination], Awaitable[str]]


async def find_error(work: Awaitable[object]) -> GatewayError | None:
    try:
        await work
    except FailedResponse as exc:
        exc.response.close()
        return exc.error
    except GatewayError as exc:
        return exc
    return None


def describe_outcome(error: GatewayError | None) -> str:
    return "success" if error is None else f"{error.status} {error.code} ({error.detail})"


async def expect(expected: type[GatewayError], words: str = "", **calls: Awaitable[object]) -> str:
    """Make the calls, which are named for messages. Raises `Difference` unless each fails as expected."""
    outcomes = {name: await find_error(call) for name, call in calls.items()}
    wrong = [
        f"{name}: {describe_outcome(error)}"
        for name, error in outcomes.items()
        if type(error) is not expected or words not in error.detail
    ]
    expectation = f"{expected.status} {expected.code}"
    if wrong:
        raise Difference(f"expected {expectation}, got {'; '.join(wrong)}")
    return expectation


def fails(expected: type[GatewayError], words: str = "", **options: Any) -> Question:
    """Return the question whether such an inference fails as expected over both transports."""

    async def ask(triton: Examination) -> str:
        over_http = triton.infer_over_http(**options)
        return await expect(expected, words, HTTP=over_http, gRPC=triton.infer_over_grpc(**options))

    return ask


def check_echo(response: InferResponse) -> str:
    result = response.outputs.get("RESULT")
    if result is None or not np.array_equal(result, VALUES):
        raise Difference(f"the response does not have the values that were sent, but {result}")
    return "the values that were sent"


async def ask_server(triton: Examination) -> str:
    return f"{triton.replica.name}: Triton {(await triton.read_json('/v2'))['version']}"


async def ask_index(triton: Examination) -> str:
    index = await triton.read_index()
    if unknown := index.state_counts.keys() - STATE_RANKS.keys():
        raise Difference(f"models are in unknown states: {join_names(sorted(unknown))}")
    return f"{len(index.models)} models"


async def ask_restricted_api(triton: Examination) -> str:
    if triton.replica.restricted_api is None:
        raise NotAsked("GATEWAY_TRITON_RESTRICTED_API is not set")
    response = await triton.request(b"POST", INDEX_PATH, has_secret=False)
    if response.status != 403:
        raise Difference(f"the index without the secret: status {response.status}")
    unload = build_unload_request(UNKNOWN_MODEL.model, {})
    await expect(LoadFailed, "restricted", gRPC=triton.manage(unload, has_secret=False))
    return "refused without the secret"


async def ask_signature(triton: Examination) -> str:
    metadata = await triton.read_json(MODEL_PATH)
    signature = build_signature(metadata, await triton.read_json(f"{MODEL_PATH}/config"))
    for name in ("inputs", "outputs", "max_batch_size", "is_decoupled", "versions"):
        found, expected = (getattr(each, name) for each in (signature, triton.variant.signature))
        if found != expected:
            raise Difference(f"{name}: {found}, instead of {expected}")
    return "as in the config that was sent"


async def ask_echo(
    infer: Callable[[Examination], Awaitable[InferResponse]], triton: Examination
) -> str:
    return check_echo(await infer(triton))


async def ask_malformed(triton: Examination) -> str:
    path = f"{MODEL_PATH}/infer".encode()
    call = HttpCall(TARGET, b"POST", path, [(b"content-length", b"1")], b"{")
    return await expect(
        errors.MalformedRequest, HTTP=call.send(triton.replica, TARGET.timeout_s, None)
    )


async def ask_statistics(triton: Examination) -> str:
    response = await triton.request(b"GET", f"{MODEL_PATH}/stats".encode())
    (statistics,) = parse_statistics(response.body)
    return f"{statistics['inference_count']} inferences"


async def ask_metrics(triton: Examination) -> str:
    client = triton.replica.metrics
    response = await client.request(b"GET", b"/metrics", timeout_s=TARGET.timeout_s)
    families = parse_families(split_page(response.body))
    with_model = {
        name
        for name, family in families.items()
        if any(f'model="{MODEL}"' in labels for _, labels, _ in family.samples)
    }
    if missing := [name for name in METRICS if name not in with_model]:
        raise Difference(f"missing for a loaded model: {join_names(missing)}")
    return f"{len(METRICS)} metrics of the model"


async def ask_queue(triton: Examination) -> str:
    running = asyncio.create_task(triton.infer_over_grpc(steps=LONG_STEPS))
    await asyncio.sleep(START_S)
    # One may be chosen to run next, which leaves the queue. The last one finds it full.
    waiting = (find_error(triton.infer_over_http()) for _ in range(MAX_QUEUE_SIZE + 2))
    outcomes = await asyncio.gather(*waiting)
    await running
    if errors.Overloaded not in map(type, outcomes):
        seen = "; ".join(map(describe_outcome, outcomes))
        raise Difference(f"requests for a queue of {MAX_QUEUE_SIZE}: {seen}")
    return "429 OVERLOADED"


async def ask_cancellation(triton: Examination) -> str:
    running = asyncio.create_task(triton.infer_over_grpc(steps=LONG_STEPS))
    await asyncio.sleep(START_S)
    running.cancel()
    await asyncio.wait([running])
    steps = (await triton.infer_over_http()).outputs["LAST_STEPS"].item()
    if steps >= LONG_STEPS:
        raise Difference("the model ran to its end")
    return f"the model stopped after {steps} of {LONG_STEPS} steps"


async def ask_failed_load(triton: Examination) -> str:
    load = triton.manage(build_load_request(MODEL, BROKEN.load_parameters))
    outcome = await expect(LoadFailed, FAILURE_MESSAGE, gRPC=load)
    check_echo(await triton.infer_over_http())
    return f"{outcome}; the model from before answers"


async def ask_stream(triton: Examination) -> str:
    messages = await triton.read_stream(STREAM_STEPS)
    marked = sum(map(byte_channel.is_model_response, messages))
    if not len(messages) == marked == STREAM_STEPS:
        seen = f"{len(messages)} responses, of which {marked} have triton_final_response"
        raise Difference(f"{seen}, instead of {STREAM_STEPS}")
    return f"{STREAM_STEPS} responses"


async def ask_stream_failure(triton: Examination) -> str:
    return await expect(errors.ModelFault, FAILURE_MESSAGE, gRPC=triton.read_stream(FAILURE))


async def ask_generate(triton: Examination) -> str:
    body = orjson.dumps({"VALUES": [1.5], "STEPS": STREAM_STEPS})
    response = await triton.request(b"POST", f"{MODEL_PATH}/generate_stream".encode(), body)
    events = response.body.count(b"data: ")
    media_type = response.header(b"content-type").decode()
    if not media_type.startswith(EVENT_STREAM) or events != STREAM_STEPS:
        raise Difference(f"{events} events of {STREAM_STEPS}, as {media_type or 'no type'}")
    return f"{events} events"


async def ask_unload(triton: Examination) -> str:
    await triton.manage(build_unload_request(MODEL, {}))
    for _ in range(UNLOAD_POLLS):
        if (await triton.request(b"GET", f"{MODEL_PATH}/ready".encode())).status == 400:
            return "the model is not ready any longer"
        await asyncio.sleep(POLL_S)
    raise Difference("the model is ready after its unload")


async def ask_unchanged(before: tuple[Any, ...], triton: Examination) -> str:
    for _ in range(UNLOAD_POLLS):
        if (now := await triton.observe()) == before:
            return "readiness and models are as before"
        await asyncio.sleep(POLL_S)
    raise Difference(f"readiness and models were {before}, and are {now}")


@dataclass(frozen=True)
class Behaviour:
    """A behaviour, what follows for users if it is another one, and how it is asked."""

    name: str
    consequence: str
    ask: Question


SERVER: Final = Behaviour(
    "server", "correct the address: it is that of Triton's HTTP port", ask_server
)
INDEX: Final = Behaviour("index", "the gateway sends no requests to this Triton", ask_index)
WITHOUT_MODEL: Final = (
    Behaviour(
        "restricted API", "every client that reaches Triton can run code there", ask_restricted_api
    ),
    Behaviour(
        "unknown model",
        "callers get this error for a wrong name",
        fails(errors.UnknownModel, target=UNKNOWN_MODEL),
    ),
)
ANY_MODEL: Final = (
    Behaviour("signature", "/v1 refuses requests, or converts them wrongly", ask_signature),
    Behaviour(
        "binary tensors",
        "inference through /v1 fails",
        partial(ask_echo, Examination.infer_over_http),
    ),
    Behaviour(
        "gRPC inference",
        "inference of cancellable models fails",
        partial(ask_echo, Examination.infer_over_grpc),
    ),
    Behaviour(
        "unknown version",
        "callers get this error for a wrong version",
        fails(errors.UnknownModel, target=UNKNOWN_VERSION),
    ),
    Behaviour(
        "mismatch", "callers get this error for wrong input", fails(errors.InputMismatch, rows=2)
    ),
    Behaviour("malformed request", "callers of /v2 get this error for bad JSON", ask_malformed),
    Behaviour("statistics", "GET /v2/models/stats fails", ask_statistics),
    Behaviour("metrics", "dashboards, alerts and autoscaling lack these", ask_metrics),
)
WITH_STEPS: Final = (
    Behaviour(
        "failure",
        "callers get this error if a model fails",
        fails(errors.ModelFault, FAILURE_MESSAGE, steps=FAILURE),
    ),
    Behaviour("full queue", "callers are not told to try again", ask_queue),
    Behaviour("cancellation", "models go on for clients that have left", ask_cancellation),
    Behaviour("failed load", "the report of a load lacks the reason", ask_failed_load),
)
OF_DECOUPLED: Final = (
    Behaviour(
        "decoupled model",
        "callers are not told to stream",
        fails(errors.RefusedByModel, "is decoupled"),
    ),
    Behaviour("stream", "streams of /v1 and gRPC fail or are incomplete", ask_stream),
    Behaviour("failure in a stream", "callers get this error in a stream", ask_stream_failure),
    Behaviour("generate_stream", "clients of /v2 do not get their events", ask_generate),
)
OF_SEQUENCES: Final = (
    Behaviour(
        "sequence",
        "callers are not told that their sequence has ended",
        fails(errors.SequenceNotRunning, target=UNSTARTED_SEQUENCE),
    ),
)
AFTER_UNLOAD: Final = (
    Behaviour("unload", "models that are unloaded go on", ask_unload),
    Behaviour("not ready", "callers are not told to try again later", fails(errors.ModelNotReady)),
)
WITH_PYTHON: Final = (*WITH_STEPS, *OF_DECOUPLED, *OF_SEQUENCES)
LOAD: Final = "load"


async def ask_one(triton: Examination, behaviour: Behaviour) -> Finding:
    try:
        return Finding(behaviour.name, OK, await behaviour.ask(triton))
    except NotAsked as exc:
        return Finding(behaviour.name, WARNING, f"not asked: {exc}")
    except Difference as exc:
        difference = str(exc)
    except FailedResponse as exc:
        exc.response.close()
        difference = describe_outcome(exc.error)
    except GatewayError as exc:
        difference = describe_outcome(exc)
    except (LookupError, TypeError, ValueError, AttributeError, TimeoutError) as exc:
        difference = f"unexpected response: {exc!r}"
    return Finding(behaviour.name, FAILED, difference, behaviour.consequence)


async def ask_all(triton: Examination, behaviours: Iterable[Behaviour]) -> list[Finding]:
    return [await ask_one(triton, each) for each in behaviours]


def skip(behaviours: Iterable[Behaviour], reason: str) -> list[Finding]:
    return [Finding(each.name, WARNING, f"not asked: {reason}") for each in behaviours]


async def ask_variant(
    triton: Examination, variant: Variant, behaviours: Sequence[Behaviour]
) -> list[Finding]:
    if error := await find_error(triton.load(variant)):
        return [Finding(LOAD, FAILED, describe_outcome(error)), *skip(behaviours, "not loaded")]
    return await ask_all(triton, behaviours)


async def ask_with_model(triton: Examination) -> list[Finding]:
    every_one = (*ANY_MODEL, *WITH_PYTHON, *AFTER_UNLOAD)
    error = await find_error(triton.load(QUEUED))
    if isinstance(error, ModelControlModeConflict):
        return [Finding(LOAD, WARNING, NOT_EXPLICIT), *skip(every_one, "no model can be loaded")]
    if error is not None and NO_BACKEND.search(error.detail):
        error = await find_error(triton.load(IDENTITY))
    if error is not None:
        advice = "loads with a config or files fail (GATEWAY_MODEL_UPLOADS=code)"
        failed = Finding(LOAD, FAILED, describe_outcome(error), advice)
        return [failed, *skip(every_one, "no model was loaded")]
    findings = [Finding(LOAD, OK, f"with the backend {triton.variant.backend}")]
    findings += await ask_all(triton, ANY_MODEL)
    if triton.variant is QUEUED:
        findings += await ask_all(triton, WITH_STEPS)
        findings += await ask_variant(triton, DECOUPLED, OF_DECOUPLED)
        findings += await ask_variant(triton, STATEFUL, OF_SEQUENCES)
    else:
        findings += skip(WITH_PYTHON, "this Triton lacks the Python backend")
    return [*findings, *await ask_all(triton, AFTER_UNLOAD)]


async def examine(triton: Examination) -> list[Finding]:
    findings: list[Finding] = []
    for behaviour in (SERVER, INDEX):
        findings.append(await ask_one(triton, behaviour))
        if findings[-1].status == FAILED:
            return findings
    findings += await ask_all(triton, WITHOUT_MODEL)
    before = await triton.observe()
    try:
        findings += await ask_with_model(triton)
    finally:
        # Also after an interruption. That the model is left is among the findings.
        await find_error(triton.manage(build_unload_request(MODEL, {})))
    advice = f"see the index of Triton: another client changed it, or {MODEL} is left"
    unchanged = Behaviour("repository", advice, partial(ask_unchanged, before))
    return [*findings, await ask_one(triton, unchanged)]


async def examine_address(url: str, settings: Settings) -> list[Finding]:
    source = parse_replica_source(url)
    tls = create_tls_context(settings, [source])
    address = next(iter(await find_addresses(source)))
    replica = Replica(address, settings, tls)
    try:
        return await examine(Examination(replica))
    finally:
        replica.close()


def run_conformance_checks(url: str) -> list[Finding]:
    """Ask the Triton at the address; of several, the first. Raises `CommandError`."""
    logging.disable(logging.WARNING)  # the findings say the same
    settings = read_settings(*SETTINGS)
    try:
        return asyncio.run(examine_address(url, settings))
    except (OSError, UnicodeError) as exc:
        raise CommandError(f"{url} cannot be used: {exc}") from None
