"""The images of the Dockerfile, built and run under the manifests' limits: make containers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from tests.project.container_engine import Container, Engine, engine
from tests.support.manifests import Manifests, Resource, quantity
from tests.support.servers import ROOT, free_ports
from tests.support.wait import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

TRITON_PORTS = ("--triton-http-port", "--triton-grpc-port", "--triton-metrics-port")
SEVEN = (ROOT / "docs/images/seven.png").read_bytes()
IN_MEMORY = ("--env=GATEWAY_STATE=memory:",)  # instead of a volume
# Programs for a container that has only Python.
PROGRAMS = "import os; [print(*os.listdir(f)) for f in os.get_exec_path() if os.path.isdir(f)]"
LOADED = """import ctypes, pathlib
print(len([ctypes.CDLL(str(library)) for library in pathlib.Path("/usr/local").rglob("*.so*")]))"""


@pytest.fixture(scope="module")
def containers() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def gateway_image(containers: Engine) -> str:
    return containers.build("gateway")


@pytest.fixture(scope="module")
def embedded_image(containers: Engine) -> str:
    return containers.build("embedded")


def memory(name: str, variant: str = "dev") -> str:
    """Return podman's option for the memory limit of a pod's container in the manifests."""
    (container,) = Manifests.of(variant).pod(name)["containers"]
    return f"--memory={int(quantity(container['resources']['limits']['memory']))}"


def wait_for(url: str, container: Container, timeout_s: float = 300) -> None:
    def ready() -> bool:
        try:
            return httpx.get(url, timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(ready, timeout_s)
    except AssertionError:
        pytest.fail(f"{url} is not ready:\n{container.log()[-4000:]}", pytrace=False)


def assert_serves(client: httpx.Client) -> None:
    image = client.post(
        "/v1/models/ensemble/infer", content=SEVEN, headers={"Content-Type": "image/png"}
    )
    assert image.json()["outputs"]["result"]["predictions"][0]["label"] == "7", image.text
    text = client.post(
        "/v1/models/text_ensemble/infer", content="a ship", headers={"Content-Type": "text/plain"}
    )
    assert len(text.json()["outputs"]["EMBEDDING"]) == 384, text.text


@pytest.fixture
def embedded(containers: Engine, embedded_image: str) -> Iterator[tuple[Container, str]]:
    port, *triton = free_ports(4)
    options = (memory("triton"), "--shm-size=512m")
    ports = [f"{flag}={number}" for flag, number in zip(TRITON_PORTS, triton, strict=True)]
    with containers.container(embedded_image, options, "up", f"--port={port}", *ports) as container:
        wait_for(f"http://127.0.0.1:{port}/readyz", container)
        yield container, f"http://127.0.0.1:{port}"


def test_embedded_image_serves_with_a_read_only_file_system(
    embedded: tuple[Container, str],
) -> None:
    container, url = embedded
    with httpx.Client(base_url=url, timeout=60) as client:
        assert_serves(client)
    assert container.look("{{.HostConfig.ReadonlyRootfs}}") == "true"
    assert container.inside("sh", "-c", "test $(id -u) -ne 0 && ! touch /opt/triton-gateway/x")
    container.terminate()
    assert container.end(60) == 0


@pytest.fixture
def fleet(
    containers: Engine, gateway_image: str, embedded_image: str, tmp_path: Path
) -> Iterator[tuple[Container, str]]:
    """The gateway's image before the Triton of the embedded one, with the settings of the manifests."""
    made = Manifests.of("dev")
    port, http, grpc, metrics = free_ports(4)
    numbers = zip(TRITON_PORTS, (http, grpc, metrics), strict=True)
    words = ["triton", *(f"{flag}={number}" for flag, number in numbers)]
    models = made.get("ConfigMap", "triton-gateway-models")["data"]["models.yaml"]
    (tmp_path / "models.yaml").write_text(models)
    tmp_path.chmod(0o755)  # for whom the container runs as
    url = f"http://127.0.0.1:{http}?grpc={grpc}&metrics={metrics}"
    given = {**made.settings(), "GATEWAY_TRITON_URLS": url, "GATEWAY_DRAIN_S": "10"}
    options = [
        memory("triton-gateway"),
        f"--volume={tmp_path}:/etc/triton-gateway/models:ro",
        *(f"--env={name}={value}" for name, value in given.items()),
    ]
    with ExitStack() as stack:
        run = stack.enter_context
        triton = run(
            containers.container(embedded_image, (memory("triton"), "--shm-size=512m"), *words)
        )
        gateway = run(containers.container(gateway_image, options, "serve", f"--port={port}"))
        wait_for(f"http://127.0.0.1:{http}/v2/health/ready", triton)
        wait_for(f"http://127.0.0.1:{port}/readyz", gateway)
        yield gateway, f"http://127.0.0.1:{port}"


def send_until_not_ready(url: str, statuses: list[int]) -> None:
    """Like a balancer: requests go there until /readyz is 503. What each of them came to."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while client.get("/readyz").status_code == 200:
            answer = client.post(
                "/v1/models/ensemble/infer", content=SEVEN, headers={"Content-Type": "image/png"}
            )
            statuses.append(answer.status_code)


def test_stopped_gateway_image_loses_no_request(
    fleet: tuple[Container, str],
) -> None:
    container, url = fleet
    with httpx.Client(base_url=url, timeout=60) as client:
        assert_serves(client)
    with ThreadPoolExecutor(8) as pool:
        statuses: list[int] = []
        load = [pool.submit(send_until_not_ready, url, statuses) for _ in range(8)]
        try:
            wait_until(lambda: len(statuses) >= 50 or any(sender.done() for sender in load))
        finally:
            container.terminate()
        for sender in load:
            sender.result(60)
    assert container.end(60) == 0
    assert len(statuses) >= 50
    assert set(statuses) == {200}


def for_podman(made: Manifests, images: dict[str, str], folder: Path) -> list[Resource]:
    """Reduce the manifests to what podman 4 supports: no probes, no Service, no emptyDir for other users."""
    folder.chmod(0o1777)
    settings = made.get("ConfigMap", "triton-gateway-settings")
    settings["data"]["GATEWAY_TRITON_URLS"] = "dns+http://localhost:8000"
    deployments = made.kind("Deployment")
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        for volume in pod["volumes"]:
            if volume.pop("emptyDir", None):
                path = "/dev/shm" if volume["name"] == "shm" else str(folder)
                volume["hostPath"] = {"path": path, "type": "Directory"}
        for container in pod["containers"]:
            container["image"] = images[container["image"]]
            for key in ("ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle"):
                container.pop(key, None)
    return [*made.kind("ConfigMap"), *deployments]


def test_pods_of_the_dev_overlay_serve(
    containers: Engine, gateway_image: str, embedded_image: str, tmp_path: Path
) -> None:
    for port in (8000, 8001, 8002, 8080):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port}, which the manifests name, is taken on this machine")
    images = {
        "triton-gateway:0.2.0": gateway_image,
        "triton-gateway-embedded:0.2.0": embedded_image,
    }
    resources = for_podman(Manifests.of("dev"), images, tmp_path)
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(resources))
    with containers.pods(tmp_path / "pods.yaml"):
        container = Container(containers, "triton-gateway-pod-0-gateway")
        wait_for("http://127.0.0.1:8080/readyz", container)
        with httpx.Client(base_url="http://127.0.0.1:8080", timeout=60) as client:
            assert_serves(client)
        assert (
            container.look("{{.HostConfig.ReadonlyRootfs}} {{.Config.User}}") == "true 10001:10001"
        )
        status = container.says("python3", "-c", "print(open('/proc/1/status').read())")
        assert "CapEff:\t0000000000000000" in status


def test_health_check_of_the_image_succeeds_while_it_serves(
    containers: Engine, gateway_image: str
) -> None:
    (image,) = json.loads(containers.run("podman", "inspect", gateway_image))
    _, *command = image["Healthcheck"]["Test"]
    (port,) = free_ports(1)
    command = [word.replace("8080", str(port)) for word in command]
    with containers.container(gateway_image, IN_MEMORY, "serve", f"--port={port}") as container:
        wait_for(f"http://127.0.0.1:{port}/livez", container)
        assert container.inside(*command)
        assert not container.inside(*(word.replace("/livez", "/none") for word in command))


def test_gateway_image_has_no_program_but_its_command_and_python(
    containers: Engine, gateway_image: str
) -> None:
    (port,) = free_ports(1)
    with containers.container(gateway_image, IN_MEMORY, "serve", f"--port={port}") as container:
        key = ("triton-gateway", "key")
        container.says(*key, "create", "shop", "--file=/tmp/keys.yaml")
        assert "shop" in container.says(*key, "list", "--file=/tmp/keys.yaml")
        programs = container.says("python3", "-c", PROGRAMS).split()
        assert sorted(programs) == ["python", "python3", "python3.11", "triton-gateway"]
        assert not container.inside("/bin/sh", "-c", "exit 0")
        for installer in ("pip", "ensurepip"):
            assert not container.inside("python3", "-c", f"import {installer}")
        assert int(container.says("python3", "-c", LOADED)) > 50
