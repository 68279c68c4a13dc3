"""Keys, roles and rates over gRPC, before real tritonservers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2

from gateway.capabilities.grpc_api.methods import TRITON_METHODS
from gateway.capabilities.grpc_api.wire import encode_field
from gateway.triton.grpc.byte_channel import GRPC_SERVICE
from tests.capabilities.grpc_api.support.grpc_gateway import (
    SERVICE,
    STREAM,
    call_bytes,
    failure,
    fp32,
    grpc_gateway,
)
from tests.support.fleet import ECHO, QUICK, Fleet, fleet_of, url_of
from tests.support.keys import (
    ADMIN,
    ENTRIES,
    FREE,
    INFER,
    INFERENCE,
    MANAGEMENT,
    MAY,
    METRICS,
    bearer,
    entry,
    written,
)
from tests.support.servers import free_ports, gateway_before
from tests.support.wait import wait_until

HEALTH = "/grpc.health.v1.Health/Check"
ECHOES = "tgw_echoes-secret"
ECHOES_ADMIN = "tgw_echoes-admin-secret"
RATED = "tgw_rated-secret"
KEYS = [
    *ENTRIES,
    entry(ECHOES, "infer", models=["ech*"]),
    entry(ECHOES_ADMIN, "admin", models=["ech*"]),
    entry(RATED, "infer", requests_per_second=0.01),
]


class Row(NamedTuple):
    """A method, for whom it is, its request, and the code for a caller who may call it."""

    method: str
    whose: str
    request: bytes = b""
    code: str = "OK"


def named(message_type: Any, **fields: Any) -> bytes:
    return bytes(message_type(**fields).SerializeToString())


def infer_request(model: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="FP32", shape=[2])
    request.raw_input_contents.append(bytes(8))
    return bytes(request.SerializeToString())


MODEL = named(service_pb2.ModelMetadataRequest, name="echo")
LOAD = named(service_pb2.RepositoryModelLoadRequest, model_name="echo")
UNLOAD = named(service_pb2.RepositoryModelUnloadRequest, model_name="no-such-model")
ROWS = (
    Row("ServerLive", INFERENCE),
    Row("ServerReady", INFERENCE),
    Row("ServerMetadata", INFERENCE),
    Row("ModelReady", INFERENCE, MODEL),
    Row("ModelMetadata", INFERENCE, MODEL),
    Row("ModelConfig", INFERENCE, MODEL),
    Row("ModelStatistics", INFERENCE, MODEL),
    Row("ModelInfer", INFERENCE, infer_request("echo")),
    Row("RepositoryIndex", MANAGEMENT),
    Row("RepositoryModelLoad", MANAGEMENT, LOAD),
    Row("RepositoryModelUnload", MANAGEMENT, UNLOAD, "NOT_FOUND"),
    Row("TraceSetting", MANAGEMENT),
    Row("LogSettings", MANAGEMENT),
    Row("SystemSharedMemoryStatus", INFERENCE),
    Row("SystemSharedMemoryUnregister", INFERENCE),
    Row("SystemSharedMemoryRegister", INFERENCE, code="PERMISSION_DENIED"),
    Row("CudaSharedMemoryStatus", INFERENCE),
    Row("CudaSharedMemoryUnregister", INFERENCE),
    Row("CudaSharedMemoryRegister", INFERENCE, code="PERMISSION_DENIED"),
)  # fmt: skip


class Guarded(NamedTuple):
    fleet: Fleet
    address: str
    keys: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A gateway with keys before two real Tritons."""
    folder = tmp_path_factory.mktemp("grpc-keys")
    keys = written(folder / "keys.yaml", KEYS)
    (port,) = free_ports(1)
    with fleet_of(
        folder,
        2,
        keys_file=str(keys),
        grpc_port=str(port),
        log_level="info",
        audit_log=str(folder / "audit.log"),
    ) as fleet:
        fleet.client.headers.update(bearer(ADMIN))
        yield Guarded(fleet, f"127.0.0.1:{port}", keys)


def code_of(guarded: Guarded, path: str, request: bytes, *metadata: tuple[str, str]) -> str:
    try:
        call_bytes(guarded.address, path, request, metadata=metadata)
    except grpc.RpcError as exc:
        return str(exc.code().name)
    return "OK"


def authorization(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")] if key else []


def test_method_admits_the_callers_of_its_row(guarded: Guarded, subtests: pytest.Subtests) -> None:
    assert {row.method for row in ROWS} == {*TRITON_METHODS, "ServerReady"}
    service = service_pb2.DESCRIPTOR.services_by_name[GRPC_SERVICE.rpartition(".")[2]]
    assert {method.name for method in service.methods} == {
        *(row.method for row in ROWS),
        "ModelStreamInfer",
    }
    for row in ROWS:
        for key in ("", "wrong", INFER, METRICS, ADMIN):
            expected = row.code if key in MAY[row.whose] else "PERMISSION_DENIED"
            if key in ("", "wrong"):
                expected = "UNAUTHENTICATED"
            with subtests.test(row.method, key=key):
                path = f"{SERVICE}/{row.method}"
                assert code_of(guarded, path, row.request, *authorization(key)) == expected


def test_health_needs_no_key_and_a_stream_needs_one(guarded: Guarded) -> None:
    assert MAY[FREE] >= {""}
    assert code_of(guarded, HEALTH, b"") == "OK"
    with grpc.insecure_channel(guarded.address) as channel:
        responses = channel.stream_stream(STREAM)(iter([infer_request("echo")]), timeout=30)
        code, message = failure(list, responses)
    assert code == "UNAUTHENTICATED"
    assert "a key is required" in message


def test_x_api_key_is_accepted_and_no_key_is_logged(guarded: Guarded) -> None:
    request = infer_request("echo")
    path = f"{SERVICE}/ModelInfer"
    assert code_of(guarded, path, request, ("x-api-key", INFER)) == "OK"
    assert code_of(guarded, path, request, ("x-api-key", "wrong")) == "UNAUTHENTICATED"
    code_of(guarded, path, b"\xff", *authorization(INFER))
    guarded.fleet.command.wait_for("ModelInfer 400")
    assert INFER not in guarded.fleet.command.output


@pytest.mark.parametrize("model", ["other", "no-such-model"])
def test_model_outside_the_patterns_of_a_key_is_not_found(guarded: Guarded, model: str) -> None:
    headers = {"authorization": f"Bearer {ECHOES}"}
    with triton_grpc.InferenceServerClient(guarded.address) as client:
        calls = (
            (client.infer, (model, [fp32(1, 2)])),
            (client.get_model_metadata, (model,)),
            (client.get_model_config, (model,)),
            (client.get_inference_statistics, (model,)),
        )
        for call, arguments in calls:
            code, message = failure(call, *arguments, headers=headers)
            assert (code, model in message) == ("NOT_FOUND", True)
        assert not client.is_model_ready(model, headers=headers)
        code, message = failure(client.get_inference_statistics, headers=headers)
        assert code == "PERMISSION_DENIED"
        assert "access to all models" in message
        assert client.infer("echo", [fp32(1, 2)], headers=headers).as_numpy("Y").tolist() == [1, 2]


def test_rate_limit_says_when_to_retry(guarded: Guarded) -> None:
    metadata = authorization(RATED)
    with grpc.insecure_channel(guarded.address) as channel:
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        infer(infer_request("echo"), timeout=30, metadata=metadata)
        with pytest.raises(grpc.RpcError) as caught:
            infer(infer_request("echo"), timeout=30, metadata=metadata)
    error = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "may send 1 request in 100 seconds" in error.details()
    trailers = dict(error.trailing_metadata())
    assert 0 < int(trailers["grpc-retry-pushback-ms"]) <= 100_000
    assert b"google.rpc.RetryInfo" in trailers["grpc-status-details-bin"]


def read_last_audit(guarded: Guarded, *fields: str) -> list[Any]:
    line = json.loads(guarded.keys.with_name("audit.log").read_text().splitlines()[-1])
    return [line[field] for field in fields]


def test_load_and_unload_act_on_every_replica(guarded: Guarded) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with triton_grpc.InferenceServerClient(guarded.address) as client:
        client.load_model("late", headers=headers)
        wait_until(lambda: read_last_audit(guarded, "action", "model") == ["load", "late"])
        assert read_last_audit(guarded, "status") == [200]
        assert set(guarded.fleet.states("late").values()) == {"READY"}
        index = client.get_model_repository_index(headers=headers, as_json=True)["models"]
        assert {"name": "late", "version": "1", "state": "READY"} in index
        client.unload_model("late", headers=headers)
        wait_until(lambda: set(guarded.fleet.states("late").values()) == {"UNAVAILABLE"})
    wait_until(lambda: read_last_audit(guarded, "action") == ["unload"])
    answer = guarded.fleet.client.get("/v1/events", headers=headers)
    load, unload = answer.json()["events"][-2:]
    assert [each["action"] for each in (load, unload)] == ["load", "unload"]
    assert (load["caller"], len(load["replicas"])) == ("admin", len(guarded.fleet.states("late")))


def test_load_with_code_is_refused(guarded: Guarded) -> None:
    with triton_grpc.InferenceServerClient(guarded.address) as client:
        for named_parameters in (
            {"config": "{}"},
            {"config": "{}", "files": {"file:1/model.py": ECHO.encode()}},
        ):
            code, message = failure(
                client.load_model,
                "late",
                headers={"authorization": f"Bearer {ADMIN}"},
                **named_parameters,
            )
            assert code == "PERMISSION_DENIED"
            assert "Triton runs it as code" in message
            wait_until(lambda: read_last_audit(guarded, "model", "outcome") == ["late", "denied"])


@pytest.mark.fault("a load with a file whose path or name is too long")
def test_load_with_a_file_whose_name_is_too_long_is_refused(guarded: Guarded) -> None:
    (port,) = free_ports(1)
    tritons = guarded.fleet.tritons
    settings = {"keys_file": str(guarded.keys), "model_uploads": "code", "grpc_port": str(port)}
    with (
        gateway_before(*map(url_of, tritons), **settings),
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        code, message = failure(
            client.load_model,
            "echo",
            headers={"authorization": f"Bearer {ADMIN}"},
            config="{}",
            files={f"file:1/{'a' * 256}": b""},
        )
        assert (code, "each name in it 255" in message) == ("INVALID_ARGUMENT", True)
    assert all(triton.is_running for triton in tritons)


def test_administrator_of_some_models_cannot_load_others(guarded: Guarded) -> None:
    headers = {"authorization": f"Bearer {ECHOES_ADMIN}"}
    with triton_grpc.InferenceServerClient(guarded.address) as client:
        code, message = failure(client.load_model, "other", headers=headers)
        assert code == "NOT_FOUND"
        assert message.startswith("failed to load 'other'")
        names = {model.name for model in client.get_model_repository_index(headers).models}
        assert names == {"echo"}


def test_administration_without_keys_is_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        fleet_of(tmp_path, 1, grpc_port=str(port)),
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        assert client.infer("echo", [fp32(1, 2)]).as_numpy("Y").tolist() == [1, 2]
        assert client.get_model_repository_index().models
        for call in (client.load_model, client.unload_model):
            code, message = failure(call, "late")
            assert code == "PERMISSION_DENIED"
            assert "requires an admin key" in message


def test_large_message_without_tensors_is_refused(guarded: Guarded) -> None:
    message = encode_field(15, bytes(1 << 20))  # a field that no method has
    admin = authorization(ADMIN)
    for method in (
        "ServerMetadata",
        "ModelMetadata",
        "RepositoryIndex",
        "RepositoryModelUnload",
        "LogSettings",
    ):
        path = f"{SERVICE}/{method}"
        code, words = failure(call_bytes, guarded.address, path, message, metadata=admin)
        assert (code, "at most 65536" in words) == ("INVALID_ARGUMENT", True), method


def test_load_without_the_right_is_refused_unread(guarded: Guarded) -> None:
    path = f"{SERVICE}/RepositoryModelLoad"
    message = bytes(1 << 20)  # no message at all
    key = authorization(INFER)
    code, words = failure(call_bytes, guarded.address, path, message, metadata=key)
    assert (code, "lacks the role 'admin'" in words) == ("PERMISSION_DENIED", True)


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_error_does_not_reveal_the_address_of_a_replica(guarded: Guarded) -> None:
    """The replica is lost between two probes, so that the request finds out by itself."""
    triton = guarded.fleet.tritons[0]
    settings: dict[str, str] = {
        "connect_timeout_s": QUICK["connect_timeout_s"],
        "poll_interval_s": "60",
        "keys_file": str(guarded.keys),
        "log_level": "warning",
    }
    headers = {name.lower(): value for name, value in bearer(INFER).items()}
    with grpc_gateway(url_of(triton), **settings) as gateway:
        wait_until(lambda: gateway.http.get("/readyz").is_success)
        triton.kill()
        with triton_grpc.InferenceServerClient(gateway.address) as client:
            code, message = failure(client.infer, "echo", [fp32(1, 2)], headers=headers)
    triton.start()
    guarded.fleet.restore()
    assert code == "UNAVAILABLE"
    assert not re.search(r"\d+\.\d+\.\d+|localhost|:\d{3,}", message)
