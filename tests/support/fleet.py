"""A fleet of real tritonservers behind a gateway, and load for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import httpx

from tests.support.model_folders import write_model_folder
from tests.support.servers import Command, Triton, gateway
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

# Answers its input. It begins as the file "trouble" beside it says. An input below zero takes as many
# seconds; one of -1000 is held for as long as there is the file "hold", and then there is "held". While there
# is the file "broken", every inference fails with the kind of error in it.
ECHO = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        place = os.path.join(self.folder, "trouble")
        trouble = open(place).read() if os.path.exists(place) else ""
        if trouble == "hold":
            while os.path.exists(place):
                time.sleep(0.01)
        elif trouble:
            raise RuntimeError("the weights in /opt/secret/weights.bin are " + trouble)

    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            first = value.flat[0]
            broken = os.path.join(self.folder, "broken")
            if os.path.exists(broken):
                kind = getattr(pb_utils.TritonError, open(broken).read())
                error = pb_utils.TritonError("CUDA error: device-side assert triggered", kind)
                answers.append(pb_utils.InferenceResponse(error=error))
                continue
            if first == -1000:
                open(os.path.join(self.folder, "held"), "w").close()
                while os.path.exists(os.path.join(self.folder, "hold")):
                    time.sleep(0.01)
            elif first < 0:
                time.sleep(-float(first))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
        return answers
"""


CONFIG = """
backend: "python"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
"""


CHAIN = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" } },
  { model_name: "other" model_version: -1
    input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" } }
] }
"""


BODY = {"inputs": {"X": [1.0, 2.0]}}
V2_BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


class Quick(TypedDict):
    poll_interval_s: str
    connect_timeout_s: str
    log_level: str


# A gateway that notices changes soon, tolerates a machine that is busy, and logs no requests.
QUICK: Quick = {"poll_interval_s": "0.1", "connect_timeout_s": "10", "log_level": "warning"}


def write_echo(repository: Path, name: str, dims: int = 2, instances: int = 1) -> None:
    config = CONFIG.format(dims=dims, instances=instances)
    write_model_folder(repository / name, config, {"1/model.py": ECHO})


def repository(folder: Path) -> Path:
    for name in ("echo", "other", "late", "foreign"):
        write_echo(folder, name)
    (folder / "chain" / "1").mkdir(parents=True)
    (folder / "chain" / "config.pbtxt").write_text(CHAIN)
    return folder


@dataclass
class Fleet:
    """Some Tritons, each with a repository of its own, and a gateway before them."""

    tritons: list[Triton]
    client: httpx.Client
    command: Command

    def infer(self, model: str = "echo", **more: Any) -> httpx.Response:
        return self.client.post(f"/v1/models/{model}/infer", json=BODY, **more)

    def load(self, model: str, **more: Any) -> httpx.Response:
        return self.client.post(f"/v2/repository/models/{model}/load", **more)

    def unload(self, model: str, **more: Any) -> httpx.Response:
        return self.client.post(f"/v2/repository/models/{model}/unload", **more)

    def write_model(self, name: str, trouble: str = "") -> list[Path]:
        """A further model of all Tritons, not loaded; the files that trouble its load, if any."""
        files = []
        for triton in self.tritons:
            write_echo(triton.repository, name)
            files.append(triton.repository / name / "trouble")
            if trouble:
                files[-1].write_text(trouble)
        return files

    def restore(self) -> None:
        """Wait until all Tritons answer; have the models of their start ready there."""
        for triton in self.tritons:
            for trouble in triton.repository.glob("*/trouble"):
                trouble.unlink()
        wait_until(lambda: set(self.replicas().values()) <= {"UP", "EJECTED"})
        for model in self.tritons[0].options.load_models:
            # A replica that has just been started again may still be known as it was before.
            wait_until(lambda model=model: self.load(model).status_code == 200)  # type: ignore[misc]

    def replicas(self) -> dict[str, str]:
        """The state of each, as the gateway sees it."""
        found = self.client.get("/v1/replicas").json()["replicas"]
        return {replica["address"]: replica["state"] for replica in found}

    def states(self, model: str) -> dict[str, str]:
        """Return the state of a model on each Triton, as that Triton reports it."""
        found = {}
        for triton in self.tritons:
            index = post_to(triton, "index").json()
            entries = [entry for entry in index if entry["name"] == model]
            found[triton.address] = entries[0].get("state", "never") if entries else "unknown"
        return found

    def served(self, model: str = "echo") -> dict[str, int]:
        """Return the number of inferences of a model that each Triton has counted."""
        found = {}
        for triton in self.tritons:
            url = f"http://{triton.address}/v2/models/{model}/stats"
            stats = httpx.get(url, timeout=TIMEOUT_S).json()
            found[triton.address] = stats["model_stats"][0]["inference_stats"]["success"]["count"]
        return found


def post_to(triton: Triton, path: str) -> httpx.Response:
    """Call the repository of one Triton, behind the gateway's back."""
    url = f"http://{triton.address}/v2/repository/{path}"
    return httpx.post(url, timeout=TIMEOUT_S).raise_for_status()


def load_behind(triton: Triton, model: str) -> None:
    post_to(triton, f"models/{model}/load")


def unload_behind(triton: Triton, model: str) -> None:
    post_to(triton, f"models/{model}/unload")


def url_of(triton: Triton) -> str:
    return triton.options.url


@contextmanager
def fleet_of(
    folder: Path,
    count: int,
    load: tuple[str, ...] = ("echo", "other"),
    arguments: tuple[str, ...] = (),
    **settings: str,
) -> Iterator[Fleet]:
    with ExitStack() as stack:
        tritons = [Triton(repository(folder / str(number)), *load) for number in range(count)]
        for triton in tritons:
            given = triton.options.extra_arguments
            triton.options = replace(triton.options, extra_arguments=(*given, *arguments))
            stack.enter_context(triton)
        for triton in tritons:
            triton.wait()
        client, command = stack.enter_context(gateway(*map(url_of, tritons), **settings))
        yield Fleet(tritons, client, command)


class Sent(NamedTuple):
    """A request of a `Load`: when it began, the status of its answer, and how long that took."""

    began: float
    status: int
    took_s: float


class Load:
    """Clients that send an inference after the other until the block ends, each with short pauses."""

    def __init__(
        self,
        url: str,
        *,
        clients: int = 16,
        model: str = "echo",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.sent: list[Sent] = []
        self._client = partial(httpx.Client, base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._path = f"/v2/models/{model}/infer"
        self._clients = clients
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._send) for _ in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for running in self._running:
            running.result()

    def _send(self) -> None:
        with self._client() as client:
            while not self._stop.is_set():
                began = time.monotonic()
                status = client.post(self._path, json=V2_BODY).status_code
                self.sent.append(Sent(began, status, time.monotonic() - began))
                self._stop.wait(0.05)

    def since(self, began: float) -> list[Sent]:
        """The requests that began then or later."""
        return [each for each in list(self.sent) if each.began >= began]

    def wait_for_more(self, count: int = 200) -> list[Sent]:
        """Return so many requests that begin now or later, when they are answered."""
        now = time.monotonic()
        wait_until(lambda: len(self.since(now)) >= count or self._failed())
        return self.since(now)

    def _failed(self) -> bool:
        """Raise what a client raised."""
        return any(running.result() for running in self._running if running.done())

    @property
    def statuses(self) -> Counter[int]:
        return Counter(each.status for each in self.sent)


def replica_states(fleet: Fleet, model: str) -> dict[str, str]:
    """Return the state of a model on each Triton, as the gateway knows it."""
    found = fleet.client.get("/v1/replicas").json()["replicas"]
    return {replica["address"]: replica["models"][model] for replica in found}
