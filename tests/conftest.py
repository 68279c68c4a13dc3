from __future__ import annotations

import os
import ssl
from collections.abc import Generator, Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.line_tracing import only_examples_traced
from tests.support.model_zoo.zoo import AS_WRITTEN, RENAMED, SHARED, Zoo, write_repository
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports, triton_with

# For each client, httpx parses all certificates of the system, in up to 17 ms of CPU time. Of a folder it
# reads what it needs.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = ssl.get_default_verify_paths().openssl_capath
# The threads of NumPy's linear algebra, which nothing here uses, spin after every start of a model.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A slow machine is no fault of what is tested. The same examples every time: a change is not refused
# for what it did not touch. `--hypothesis-profile=random` looks for new ones.
settings.register_profile(
    "random", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("tests", settings.get_profile("random"), derandomize=True)
settings.load_profile("tests")

LANES = ("system", "faults", "integration", "unit")  # in the order in which they start
LONGEST_FIRST = ("zoo", "test_up", "test_auth", "test_client", "test_fleet_f", "test_page")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of a file on one worker, and those that share the servers slowest to start.

    The groups are set here because xdist reads them before `pytest_collection_modifyitems` runs.
    """
    if isinstance(item, pytest.Function):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        default = "as written" if "zoo_as_written" in item.fixturenames else ""
        names = params.get("zoo", default)
        group = f"zoo, {names}" if names else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest groups, so that no worker is left with one of them at the end."""
    items.sort(key=start_order)


def start_order(item: pytest.Item) -> tuple[int, int]:
    marker = item.get_closest_marker("xdist_group")
    group = marker.args[0] if marker else ""
    longest = [number for number, name in enumerate(LONGEST_FIRST) if group.startswith(name)]
    lane = next((number for number, name in enumerate(LANES) if name in item.path.parts), 0)
    return (longest[0] if longest else len(LONGEST_FIRST), lane)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    with only_examples_traced(pyfuncitem.obj):
        return (yield)


# Of a gateway on a machine that is busy.
PATIENT = {"connect_timeout_s": "10"}


@pytest.fixture(scope="session")
def demo_triton() -> Iterator[EmbeddedTriton]:
    """The real tritonserver with the models of triton_repo."""
    demonstration = ROOT / "triton_repo"
    with triton_on_free_ports(
        demonstration, "ensemble", "text_ensemble", auto_complete=True
    ) as triton:
        yield triton


@pytest.fixture(scope="session")
def demo(demo_triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    """The gateway before the real tritonserver with the models of triton_repo."""
    with gateway_before(demo_triton.options.url, **PATIENT) as client:
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
    """The models by the names that the tests use, mostly over HTTP."""
    with gateway_before(zoo_triton.options.url, **PATIENT) as client:
        yield Zoo(client, AS_WRITTEN)


@pytest.fixture(scope="session")
def zoo_renamed(zoo_triton: EmbeddedTriton) -> Iterator[Zoo]:
    """The models with every name drawn, over gRPC."""
    settings = {**PATIENT, "cancellable_models": "*"}
    with gateway_before(zoo_triton.options.url, **settings) as client:
        yield Zoo(client, RENAMED)


@pytest.fixture(scope="session", params=["as written", "renamed"])
def zoo(request: pytest.FixtureRequest) -> Zoo:
    """Both of them, one after the other."""
    fixture: Zoo = request.getfixturevalue(f"zoo_{request.param}".replace(" ", "_"))
    return fixture
