from __future__ import annotations

import faulthandler
import gc
import math
import os
import re
import shutil
import ssl
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.durations import group_of, read_durations, record_durations
from tests.support.gateway_forks import stop_server
from tests.support.missing import summarize_skips
from tests.support.model_zoo.zoo import AS_WRITTEN, RENAMED, SHARED, Zoo, write_repository
from tests.support.processes import RUN_VARIABLE, end_processes, forbid_processes
from tests.support.servers import ROOT, Triton, gateway_before, triton_on_free_ports, triton_with

# For each client, httpx parses all certificates of the system, in up to 17 ms of CPU time. Of a folder it
# reads what it needs.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = ssl.get_default_verify_paths().openssl_capath
# The threads of NumPy's linear algebra, which nothing here uses, spin after every start of a model.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A slow machine is no fault of what is tested. The same examples every time: a change is not refused
# for what it did not touch. `--hypothesis-profile=random` draws new ones, and `make test-long` more.
settings.register_profile(
    "random", max_examples=300, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "long", settings.get_profile("random"), derandomize=True, max_examples=100
)
settings.register_profile("tests", settings.get_profile("long"), max_examples=10)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write tests/data/durations.json"
    )


STDERR = pytest.StashKey[int]()
GRACE_S = 60


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a folder for temporary files, which every process of it inherits."""
    config.stash[STDERR] = os.dup(2)  # which is not captured yet
    if not hasattr(config, "workerinput"):
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="triton-gateway-tests-")
        os.environ[RUN_VARIABLE] = os.environ["TMPDIR"]
        tempfile.tempdir = None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process is left, after the workers have ended."""
    stop_server()
    if not hasattr(session.config, "workerinput"):
        left = end_processes(Path(os.environ["TMPDIR"]))
        if left:
            print("\nprocesses that no test ended:", *left, sep="\n")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = [each for reports in terminalreporter.stats.values() for each in reports]
    reports = [each for each in found if isinstance(each, pytest.TestReport)]
    if config.getoption("record_durations"):
        record_durations(reports)
    # Once for all tests, and not for each, as `-rs` would.
    skipped = [each.longrepr for each in reports if each.skipped and not hasattr(each, "wasxfail")]
    reasons = [each[2].removeprefix("Skipped: ") for each in skipped if isinstance(each, tuple)]
    if reasons:
        terminalreporter.section("skipped")
        for line in summarize_skips(reasons):
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, with the stacks of its threads, if the timeout of a test did not end it.

    For example, a test that is left by an exception waits for its threads without a limit.
    """
    limit_test(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    limit_test(item)  # again: pytest ends the limit when a test fails
    return (yield)


def limit_test(item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    timeout_s = marker.args[0] if marker else float(item.config.getini("timeout"))
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=stderr)


# Fixtures that take long to start: all tests that use one run in the same process.
SHARED_SERVERS = ("demo_triton", "zoo_triton")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of a file in one process, and those that share the servers slowest to start.

    The groups are set here because xdist reads them before `pytest_collection_modifyitems` runs.
    """
    if isinstance(item, pytest.Function):
        shared = next((name for name in SHARED_SERVERS if name in item.fixturenames), None)
        file = item.path.relative_to(ROOT / "tests").with_suffix("")
        item.add_marker(pytest.mark.xdist_group(shared or ".".join(file.parts)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the groups that took longest when `make durations` last recorded them."""
    durations_s = read_durations()
    items.sort(key=lambda item: -durations_s.get(group_of(item), math.inf))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Never search for garbage among modules and tests: each search takes half a second."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module whose tests are all deselected: in each process it takes up to a second."""
    deselected = re.findall(r"not (\w+)", config.option.markexpr)
    if not deselected or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    marks = re.findall(r"^pytestmark = pytest\.mark\.(\w+)$", text, re.MULTILINE)
    return True if set(marks) & set(deselected) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures of the test are set up: the servers that it shares with earlier tests run."""
    Triton.restart_crashed()


@pytest.fixture(autouse=True)
def no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that started a process, or whose fixtures did."""
    with forbid_processes() if "unit" in request.path.parts else nullcontext():
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the gateway."""
    return "asyncio", {"use_uvloop": True}


# Of a gateway on a machine that is busy.
PATIENT = {"connect_timeout_s": "10"}


@pytest.fixture(scope="session")
def demo_triton() -> Iterator[EmbeddedTriton]:
    """The real tritonserver with the models of triton_repo."""
    demonstration = ROOT / "triton_repo"
    with triton_on_free_ports(demonstration, "ensemble", "text_ensemble") as triton:
        yield triton


@pytest.fixture(scope="session")
def demo(
    demo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """The gateway before the real tritonserver with the models of triton_repo."""
    jobs = f"sqlite://{tmp_path_factory.mktemp('jobs')}"
    with gateway_before(demo_triton.options.url, jobs=jobs, **PATIENT) as client:
        yield client


@pytest.fixture(scope="session")
def zoo_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A real tritonserver before the test repository, as written and with every name drawn.

    No model is loaded: each test loads what it uses, and unloads no model that others use.
    """
    folder = tmp_path_factory.mktemp("zoo")
    for names in (AS_WRITTEN, RENAMED):
        write_repository(folder, names, SHARED)
    with triton_with((folder,)) as triton:
        yield triton


@pytest.fixture(scope="session")
def zoo_as_written(zoo_triton: EmbeddedTriton) -> Iterator[Zoo]:
    with gateway_before(zoo_triton.options.url, **PATIENT) as client:
        yield Zoo(client, AS_WRITTEN)


@pytest.fixture(scope="session")
def zoo_renamed(zoo_triton: EmbeddedTriton) -> Iterator[Zoo]:
    settings = {**PATIENT, "cancellable_models": "*"}
    with gateway_before(zoo_triton.options.url, **settings) as client:
        yield Zoo(client, RENAMED)


@pytest.fixture(scope="session")
def zoo(request: pytest.FixtureRequest) -> Zoo:
    """The models of the test repository behind a gateway that uses HTTP, by the names in the tests.

    A test marked `any_names` runs once more over gRPC and with drawn names of models and tensors.
    """
    name = getattr(request, "param", "as written")
    fixture: Zoo = request.getfixturevalue(f"zoo_{name}".replace(" ", "_"))
    return fixture
