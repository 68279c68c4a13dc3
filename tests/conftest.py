from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gateway.triton.embedded import EmbeddedTriton
from tests.support.model_zoo.zoo import Names, Zoo, write_repository
from tests.support.servers import ROOT, gateway_before, triton_on_free_ports


def pytest_itemcollected(item: pytest.Item) -> None:
    """Side by side, a file stays together; so does what shares the servers that take longest to start.

    Here, and not when all are collected: xdist reads the groups before a conftest's hook could set them.
    """
    if isinstance(item, pytest.Function):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        group = f"zoo, {params['zoo']}" if "zoo" in params else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def demo_triton() -> Iterator[EmbeddedTriton]:
    """The real tritonserver with the models of triton_repo."""
    with triton_on_free_ports(ROOT / "triton_repo", "ensemble", "text_ensemble") as triton:
        yield triton


@pytest.fixture(scope="session")
def demo(demo_triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    """The gateway before the real tritonserver with the models of triton_repo."""
    with gateway_before(demo_triton.options.url) as client:
        yield client


@pytest.fixture(scope="session", params=["as written", "renamed"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    """The gateway before the test repository: once as it is written, over HTTP; once with every name drawn,
    over gRPC."""
    names = Names(seed=7 if request.param == "renamed" else None)
    folder = tmp_path_factory.mktemp("zoo")
    write_repository(folder, names)
    settings = {"cancellable_models": "*"} if request.param == "renamed" else {}
    with (
        triton_on_free_ports(folder) as triton,
        gateway_before(triton.options.url, **settings) as client,
    ):
        yield Zoo(client, names)
