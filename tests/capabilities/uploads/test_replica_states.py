"""Uploads and removals while a replica is down, hangs or loads the model, on real Tritons."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fleet import ECHO, post_to, write_echo
from tests.support.servers import Triton
from tests.support.uploads import (
    FIRST,
    SECOND,
    UNKNOWN_OPERATOR,
    FolderPlace,
    folder_place,
    listed_states,
)
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderPlace]:
    with folder_place(tmp_path_factory.mktemp("replicas"), load_timeout_s="30") as place:
        yield place


def stop(triton: Triton) -> None:
    triton.signal(signal.SIGSTOP)


def go_on(triton: Triton) -> None:
    triton.signal(signal.SIGCONT)


def restart(triton: Triton) -> None:
    triton.start()
    triton.wait()


@pytest.mark.fault("a version that cannot be loaded is uploaded while a replica is down or hangs")
@pytest.mark.parametrize(
    ("leave", "come_back"),
    [
        pytest.param(Triton.kill, restart, id="down"),
        pytest.param(stop, go_on, id="hung", marks=pytest.mark.long),
    ],
)
def test_a_bad_version_uploaded_without_a_replica_leaves_the_good_one(
    place: FolderPlace,
    request: pytest.FixtureRequest,
    leave: Callable[[Triton], None],
    come_back: Callable[[Triton], None],
) -> None:
    model = f"good-{request.node.callspec.id}"
    assert place.client.put(f"/v1/models/{model}", content=FIRST).status_code == 201
    absent = place.tritons[1]
    leave(absent)
    try:
        refused = place.client.put(f"/v1/models/{model}", content=UNKNOWN_OPERATOR)
    finally:
        come_back(absent)
    assert (refused.status_code, refused.json()["code"]) == (422, "LOAD_FAILED"), refused.text
    assert "Odd" in refused.json()["error"]
    assert refused.json()["replicas"][absent.address]["state"] == "UNREACHABLE"
    assert place.versions(model) == ["1"]
    wait_until(lambda: listed_states(place.client, model) == ["READY", "READY"])
    assert place.infer(model) == [2, 3]
    uploaded = place.client.put(f"/v1/models/{model}", content=SECOND)
    assert (uploaded.status_code, uploaded.json()["version"]) == (201, "2"), uploaded.text
    assert place.infer(model) == [3, 4]


@pytest.mark.long
@pytest.mark.fault("a version that cannot be loaded is uploaded while a replica is down or hangs")
def test_an_upload_that_reaches_no_replica_changes_nothing(place: FolderPlace) -> None:
    assert place.client.put("/v1/models/unreached", content=FIRST).status_code == 201
    for triton in place.tritons:
        stop(triton)
    try:
        refused = place.client.put("/v1/models/unreached", content=SECOND)
    finally:
        for triton in place.tritons:
            go_on(triton)
    assert (refused.status_code, refused.json()["code"]) == (503, "UNAVAILABLE"), refused.text
    assert "'unreached' is loaded on 0 of 2 replicas" in refused.json()["error"]
    assert place.versions("unreached") == ["1"]
    wait_until(lambda: listed_states(place.client, "unreached") == ["READY", "READY"])
    assert place.infer("unreached") == [2, 3]
    assert place.client.put("/v1/models/unreached", content=SECOND).json()["version"] == "2"


# While it is held, it says so.
HELD = ECHO.replace(
    'if trouble == "hold":', 'if trouble == "hold":\n            open(place + "-begun", "w")'
)


@pytest.mark.fault("a model or a version is removed or replaced while a replica loads the model")
@pytest.mark.parametrize(
    "is_ready", [False, pytest.param(True, marks=pytest.mark.long)], ids=["new", "again"]
)
def test_files_stay_until_no_replica_loads_the_model(place: FolderPlace, is_ready: bool) -> None:
    """At first longer than a gateway waits for it, then not.

    Something else than the gateways loads a new version. A version that is ready stays so in the index, while
    another gateway loads it again.
    """
    model = f"held-{is_ready}"
    folder, loading = place.repository / model, place.tritons[1]
    path, load_path = f"/v1/models/{model}", f"/v2/repository/models/{model}/load"
    write_echo(place.repository, model)
    assert place.client.post(load_path).status_code == 200
    shutil.copytree(folder / "1", folder / "2")
    if is_ready:
        assert place.client.post(load_path).status_code == 200
    (folder / "2" / "model.py").write_text(HELD)
    trouble = folder / "trouble"
    trouble.write_text("hold")
    files = sorted(folder.rglob("*.p*"))
    settings = {"model_uploads": "code", "load_timeout_s": "2"}
    with ThreadPoolExecutor() as pool, place.another_gateway(**settings) as (hasty, _):
        if is_ready:
            load = pool.submit(place.client.post, load_path)
        else:
            load = pool.submit(post_to, loading, f"models/{model}/load")
        try:
            wait_until((folder / "trouble-begun").exists)
            for method, changed in (
                ("DELETE", f"{path}/versions/2"),
                ("DELETE", path),
                ("PUT", f"{path}/versions/2?filename=model.py"),
            ):
                refused = hasty.request(method, changed, content=ECHO)
                assert (refused.status_code, refused.json()["code"]) == (
                    409,
                    "CHANGE_IN_PROGRESS",
                ), changed
                assert "a load on " in refused.json()["error"]
                assert loading.address in refused.json()["error"]
                assert sorted(folder.rglob("*.p*")) == files
            removal = pool.submit(place.client.delete, f"{path}/versions/2")
        finally:
            trouble.unlink()
        assert load.result().status_code == 200
    assert removal.result().json() == {"model": model, "version": "2"}
    assert place.versions(model) == ["1"]
    assert place.infer(f"{model}/versions/1") == [1, 2]
    assert place.client.delete(path).status_code == 200
