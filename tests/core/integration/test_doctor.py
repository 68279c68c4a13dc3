"""`triton-gateway doctor`, as a process, with the environments that it is asked about."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.doctor import examine
from tests.support.keys import ADMIN, ENTRIES, INFER, entry, written
from tests.support.model_zoo.zoo import SHARED, Names, write_repository
from tests.support.redis_server import RedisServer
from tests.support.servers import free_ports, gateway_before, triton_on_free_ports

NAMES = Names(seed=5)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("models")
    write_repository(
        folder, NAMES, [model for model in SHARED if model.name == "plain_vector_FP32"]
    )
    with triton_on_free_ports(folder) as triton:
        yield triton


def test_doctor_finds_no_problem_in_a_healthy_environment(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    keys = written(tmp_path / "keys.yaml", [entry("tgw_a-key-of-the-test", "infer")])
    (tmp_path / "models.yaml").write_text("models: [digits]\n")
    (port,) = free_ports(1)
    status, found = examine(
        "--port",
        port,
        GATEWAY_TRITON_URLS=triton.options.url,
        GATEWAY_KEYS_FILE=keys,
        GATEWAY_MODELS_FILE=tmp_path / "models.yaml",
        GATEWAY_STATE=f"file://{tmp_path}/state.db",
    )
    assert status == 0
    assert {each["status"] for each in found.values()} == {"ok"}
    assert "Triton 2." in found["triton"]["message"]
    assert "contains 1 keys" in found["keys file"]["message"]
    assert "declares digits" in found["models file"]["message"]
    assert found["port"]["message"] == f"port {port} is free"
    checks = (
        "python",
        "embedded",
        "gpu",
        "settings",
        "keys file",
        "models file",
        "state",
        "triton",
    )
    assert [name for name in found if name in checks] == [*checks]  # capabilities add theirs
    assert [*found][-2:] == ["port", "open files"]


# The driver's library of a machine with GPUs: what `cuInit` returns, the version, and the devices.
LIBCUDA = """
#include <stdio.h>
int cuInit(int flags) {{ return {status}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
int cuGetErrorString(int status, const char **text) {{ *text = "no such driver"; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuDeviceGetName(char *name, int size, int device) {{ snprintf(name, size, "GPU %d", device); return 0; }}
"""
NO_GPU = "none: models run on the CPU, and those with kind: KIND_GPU do not load"
GPUS: list[tuple[tuple[int, int, int], str, str]] = [
    (
        (0, 13000, 2),
        "ok",
        "GPU 0 and GPU 1, with a driver for CUDA 13: the embedded Triton uses it",
    ),
    ((0, 11080, 1), "warning", "the driver is for CUDA 11; the embedded Triton needs one for 12"),
    ((803, 13000, 0), "ok", NO_GPU),
]


@pytest.mark.parametrize(("library", "status", "message"), GPUS)
def test_doctor_says_what_the_embedded_triton_finds_of_a_gpu(
    tmp_path: Path, library: tuple[int, int, int], status: str, message: str
) -> None:
    """Its library is found by LD_LIBRARY_PATH alone, as on some clouds."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    numbers = dict(zip(("status", "version", "count"), library, strict=True))
    (tmp_path / "cuda.c").write_text(LIBCUDA.format_map(numbers))
    library_file = tmp_path / "libcuda.so.1"
    compile_it = ("cc", "-shared", "-fPIC", "-o", library_file, tmp_path / "cuda.c")
    subprocess.run(compile_it, check=True)
    _, found = examine(GATEWAY_TRITON_URLS="http://127.0.0.1:1", LD_LIBRARY_PATH=tmp_path)
    assert found["gpu"]["status"] == status
    assert found["gpu"]["message"].startswith(message)
    assert ("onnx" in found) == (numbers["count"] == 2)


@pytest.mark.parametrize(("append_only", "status"), [("no", "warning"), ("yes", "ok")])
def test_doctor_asks_for_a_redis_that_keeps_the_state(
    tmp_path: Path, append_only: str, status: str
) -> None:
    with RedisServer(tmp_path, "--appendonly", append_only) as redis:
        _, found = examine(GATEWAY_TRITON_URLS="http://127.0.0.1:1", GATEWAY_STATE=redis.url())
    assert found["state"]["status"] == status
    assert ("set appendonly yes" in found["state"].get("advice", "")) == (append_only == "no")


def test_doctor_names_each_problem_and_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("model: [digits]\n")
    (tmp_path / "state.db").write_text("no state")
    (port,) = free_ports(1)
    status, found = examine(
        GATEWAY_TRITON_URLS=f"http://127.0.0.1:{port}",
        GATEWAY_KEYS_FILE=tmp_path / "missing.yaml",
        GATEWAY_MODELS_FILE=tmp_path / "models.yaml",
        GATEWAY_STATE=f"file://{tmp_path}/state.db",
        GATEWAY_TRITON_URL="http://127.0.0.1:8000",
        TRITON_GATEWAY_CACHE=tmp_path / "cache",
    )
    assert status == 1
    failed = {name for name, each in found.items() if each["status"] == "failed"}
    assert {"keys file", "models file", "state", "triton"} <= failed
    assert all(found[name]["advice"] for name in failed)
    assert "Connection refused" in found["triton"]["message"]
    assert "did you mean GATEWAY_TRITON_URLS?" in found["settings"]["message"]
    assert found["embedded"]["status"] == "warning"
    assert "tritonserver" in found["embedded"]["message"]
    assert not (tmp_path / "cache").exists()  # it changes nothing


def test_doctor_names_an_invalid_setting() -> None:
    status, found = examine(GATEWAY_DRAIN_S="never")
    assert status == 1
    assert "GATEWAY_DRAIN_S cannot be 'never'" in found["settings"]["message"]


def test_doctor_accepts_only_a_gateway_on_the_port(triton: EmbeddedTriton) -> None:
    with gateway_before(triton.options.url) as client:
        _, found = examine("--port", client.base_url.port or 0)
        assert found["port"]["status"] == "ok"
        assert "a gateway answers at" in found["port"]["message"]
    status, found = examine("--port", triton.options.http_port)
    assert (status, found["port"]["status"]) == (1, "failed")
    assert "not a gateway" in found["port"]["message"]


def test_doctor_asks_a_running_gateway(triton: EmbeddedTriton, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.yaml", ENTRIES)
    (tmp_path / "models.yaml").write_text("models: [nobody]\n")
    models = str(tmp_path / "models.yaml")
    url = triton.options.url
    with gateway_before(url, keys_file=str(keys), models_file=models) as client:
        given = ("--url", str(client.base_url), "--key")
        status, found = examine(*given, ADMIN)
        assert status == 1
        assert found["gateway"]["status"] == found["triton"]["status"] == "ok"
        assert found["readiness"]["message"] == "not ready: nobody cannot be served"
        assert found["triton"]["message"] == f"{triton.options.address} is ready"
        assert "python" not in found  # nothing of this machine
        # Whoever may not see the fleet is told so.
        for key in ("", INFER):
            status, found = examine(*given, key)
            assert status == 1
            assert found["readiness"]["message"] == "not ready; a key with the role admin sees why"
            assert found["gateway"]["status"] == "failed"
    for server in (triton.options.http_port, triton.options.grpc_port):
        status, found = examine("--url", f"http://127.0.0.1:{server}")
        assert (status, [*found]) == (1, ["gateway"])


def test_doctor_distinguishes_no_triton_from_an_unreachable_one(
    triton: EmbeddedTriton,
) -> None:
    status, found = examine(GATEWAY_TRITON_URLS=f"http://127.0.0.1:{triton.options.metrics_port}")
    assert status == 1
    assert "not a Triton" in found["triton"]["message"]
    _, found = examine(GATEWAY_TRITON_URLS="dns+http://name.invalid:8000")
    assert "cannot be resolved" in found["triton"]["message"]
