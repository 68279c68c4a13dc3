"""The processes of the fleet, the files that they share, and the requests in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.chaos.world import STEPS
from tests.support.fleet import CONFIG, QUICK, V2_BODY, write_echo
from tests.support.keys import ADMIN, BOTH, INFER, bearer, entry, written
from tests.support.model_folders import write_model_folder
from tests.support.redis_server import RedisServer
from tests.support.servers import GatewayProcess, Triton
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

# The changed models; the model of the background; one that is loaded on demand; one that comes and goes in
# the models file.
MODELS = ("a", "b")
STEADY = "steady"
LAZY = "lazy"
EXTRA = "extra"
EXTRA_KEY = BOTH
REPLICAS = ("replica 0", "replica 1", "replica 2")
GATEWAYS = ("gateway 0", "gateway 1")
REDIS = "Redis"

ADDING = """
import triton_python_backend_utils as pb_utils

NUMBER = {number}

class TritonPythonModel:
    def initialize(self, args):
        if NUMBER < 0:
            raise RuntimeError("the weights are broken")

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy() for each in requests]
        outputs = [pb_utils.Tensor("Y", value + value.dtype.type(NUMBER)) for value in values]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
"""
ADDING_CONFIG = CONFIG.format(dims=2, instances=1) + "version_policy { all { } }\n"

# The sum of its steps: each adds 1, and an ensemble passes its input through them.
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
ensemble_scheduling {{ step [ {steps} ] }}
"""
STEP = """
{{ model_name: "{name}" model_version: -1
   input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{target}" }} }}
"""
STEP_NUMBER = 1

PAUSE_S = 0.05  # of the background

Process = Triton | GatewayProcess | RedisServer


@dataclass(frozen=True)
class Failure:
    """A request of the background that failed, and when it ran."""

    gateway: str
    began: float
    ended: float
    reason: str


class Background:
    """Inferences of the steady model through each gateway, one after the other, until the block ends."""

    def __init__(self) -> None:
        self.answered = dict.fromkeys(GATEWAYS, 0)
        self.failures: list[Failure] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def start(self, gateway: str, url: str) -> None:
        thread = threading.Thread(target=self._send, args=(gateway, url), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send(self, gateway: str, url: str) -> None:
        path = f"/v2/models/{STEADY}/infer"
        with httpx.Client(base_url=url, headers=bearer(INFER), timeout=TIMEOUT_S) as client:
            while not self._stop.wait(PAUSE_S):
                began = time.monotonic()
                try:
                    answer = client.post(path, json=V2_BODY)
                    reason = "" if answer.status_code == 200 else answer.text
                except httpx.HTTPError as exc:
                    reason = repr(exc)
                if reason:
                    self.failures.append(Failure(gateway, began, time.monotonic(), reason))
                else:
                    self.answered[gateway] += 1


@dataclass
class Fleet:
    folder: Path
    redis: RedisServer
    replicas: dict[str, Triton]
    gateways: dict[str, GatewayProcess]
    background: Background
    # Those that were killed and wait for the end of the step.
    killed: list[str] = field(default_factory=list)

    @property
    def processes(self) -> dict[str, Process]:
        return {REDIS: self.redis, **self.replicas, **self.gateways}

    def start_killed(self) -> None:
        """Start Redis before the others, and wait for each."""
        for name in sorted(self.killed, key=lambda name: name != REDIS):
            process = self.processes[name]
            process.start()
            if isinstance(process, Triton):
                process.wait()
        self.killed.clear()

    def restart_crashed(self) -> list[str]:
        """Start the Tritons that have ended by themselves, as a supervisor does; return their names."""
        crashed = [name for name, triton in self.replicas.items() if not triton.is_running]
        for name in crashed:
            self.replicas[name].end()
            self.replicas[name].start()
        return crashed


def format_source(number: int) -> str:
    return ADDING.format(number=number)


def write_models_file(folder: Path, *, has_extra_model: bool) -> None:
    declared = (
        f"{STEADY}, {{name: {LAZY}, on_demand: true}}{', ' + EXTRA if has_extra_model else ''}"
    )
    replace_file(folder / "models.yaml", f"models: [{declared}]\n")


def write_keys_file(folder: Path, *, has_extra_key: bool) -> None:
    entries = [entry(ADMIN, "admin"), entry(INFER, "infer")]
    if has_extra_key:
        entries.append(entry(EXTRA_KEY, "infer"))
    written(folder / "keys.yaml", entries)


def format_ensemble(steps: Sequence[str]) -> str:
    values = ["X", *(f"between{at}" for at in range(1, len(steps))), "Y"]
    rows = zip(steps, values, values[1:], strict=False)
    text = ",".join(STEP.format(name=name, source=at, target=to) for name, at, to in rows)
    return ENSEMBLE.format(steps=text)


def replace_file(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


@contextmanager
def start_fleet(folder: Path) -> Iterator[Fleet]:
    """Two gateways with one Redis before three Tritons with one repository."""
    repository = folder / "models"
    for model in (STEADY, LAZY, EXTRA):
        write_echo(repository, model)
    for model in MODELS:
        write_model_folder(repository / model, ADDING_CONFIG, {"1/model.py": format_source(0)})
    for name, steps in STEPS.items():
        if steps:
            write_model_folder(repository / name, format_ensemble(steps), {})
            (repository / name / "1").mkdir()
        else:
            source = format_source(STEP_NUMBER)
            write_model_folder(repository / name, ADDING_CONFIG, {"1/model.py": source})
    write_models_file(folder, has_extra_model=False)
    write_keys_file(folder, has_extra_key=False)
    (folder / "redis").mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis", "--appendonly", "yes"))
        tritons = [stack.enter_context(Triton(repository)) for _ in REPLICAS]
        for triton in tritons:
            triton.wait()
        settings = {
            **QUICK,
            "triton_urls": ",".join(triton.options.url for triton in tritons),
            "state": redis.url(),
            "repository": f"file://{repository}",
            "model_uploads": "code",
            "models_file": str(folder / "models.yaml"),
            "keys_file": str(folder / "keys.yaml"),
            "idle_unload_s": "2",
            "shutdown_s": "1",
        }
        environment = {f"GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
        # Left after the gateways, whose end ends the last requests.
        background = stack.enter_context(Background())
        gateways = [GatewayProcess(environment) for _ in GATEWAYS]
        for name, gateway in zip(GATEWAYS, gateways, strict=True):
            stack.callback(gateway.kill)
            gateway.start()
            wait_until(partial(is_ready, gateway))
            background.start(name, gateway.url)
        yield Fleet(
            folder,
            redis,
            dict(zip(REPLICAS, tritons, strict=True)),
            dict(zip(GATEWAYS, gateways, strict=True)),
            background,
        )


def is_ready(gateway: GatewayProcess) -> bool:
    """Return whether the declared models are loaded."""
    return httpx.get(f"{gateway.url}/readyz", timeout=TIMEOUT_S).is_success
