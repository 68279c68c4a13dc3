"""Uploads and removals while a replica is down, hangs or loads the model, on real Tritons."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc

from tests.capabilities.grpc_api.support.grpc_gateway import failure, fp32, grpc_gateway
from tests.capabilities.uploads.support.uploads import (
    FIRST,
    SECOND,
    UNKNOWN_OPERATOR,
    FolderPlace,
    folder_place,
    listed_states,
)
from tests.support.fleet import BODY, ECHO, V2_BODY, post_to, write_echo
from tests.support.servers import Triton
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


@pytest.mark.long
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


@pytest.mark.long
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
                # A model that is served is loaded on one replica after the other.
                assert is_ready or loading.address in refused.json()["error"]
                assert sorted(folder.rglob("*.p*")) == files
            removal = pool.submit(place.client.delete, f"{path}/versions/2")
        finally:
            trouble.unlink()
        assert load.result().status_code == 200
    assert removal.result().json() == {"model": model, "version": "2"}
    assert place.versions(model) == ["1"]
    assert place.infer(f"{model}/versions/1") == [1, 2]
    assert place.client.delete(path).status_code == 200


def is_served(triton: Triton, model: str) -> bool:
    return httpx.get(f"http://{triton.address}/v2/models/{model}/ready").is_success


@pytest.mark.long
@pytest.mark.fault(
    "a model is removed, or its first version cannot be loaded, and clients use its name"
)
def test_a_model_without_files_is_as_unknown_as_any_other_name(place: FolderPlace) -> None:
    """Through two gateways that share their state, and again as before after another upload."""
    names = {"failed": UNKNOWN_OPERATOR, "removed": FIRST}
    urls = [triton.options.url for triton in place.tritons]
    with grpc_gateway(*urls, **place.settings) as other:
        clients = {place.client: "", other.http: other.address}
        for model, content in names.items():
            put = place.client.put(f"/v1/models/{model}", content=content)
            assert put.status_code == {UNKNOWN_OPERATOR: 422, FIRST: 201}[content], put.text
        wait_until(lambda: place.infer("removed", other.http) == [2, 3])
        assert place.client.delete("/v1/models/removed").status_code == 200
        for model in names:
            for client, grpc_address in clients.items():
                expected = answers_of("never", client, grpc_address)
                assert expected["POST /v1/models/NAME/infer"][:2] == (404, "MODEL_NOT_FOUND")
                wait_until(lambda: answers_of(model, client, grpc_address) == expected)  # noqa: B023
            assert place.client.put(f"/v1/models/{model}", content=SECOND).status_code == 201
            for client in clients:
                wait_until(lambda: place.infer(model, client) == [3, 4])  # noqa: B023


def answers_of(model: str, client: httpx.Client, grpc_address: str) -> dict[str, tuple[Any, ...]]:
    """The errors of requests to a model by HTTP and gRPC, without its name."""
    answers: dict[str, tuple[Any, ...]] = {}
    v1, v2 = "/v1/models/NAME", "/v2/models/NAME"
    stream = {"Accept": "text/event-stream"}
    for method, path, headers in (
        ("POST", f"{v1}/infer", {}),
        ("POST", f"{v1}/infer", stream),
        ("GET", v1, {}),
        ("POST", f"{v2}/infer", {}),
        ("POST", f"{v2}/versions/1/infer", {}),
        ("POST", f"{v2}/generate", {}),
        ("POST", f"{v2}/generate_stream", {}),
        ("GET", v2, {}),
        ("GET", f"{v2}/config", {}),
        ("GET", f"{v2}/stats", {}),
        ("GET", f"{v2}/ready", {}),
    ):
        body = BODY if path.startswith(v1) else V2_BODY
        answer = client.request(method, path.replace("NAME", model), json=body, headers=headers)
        assert answer.is_error, answer.text
        error = answer.json()["error"].replace(model, "NAME")
        answers[" ".join((method, path, *headers))] = (
            answer.status_code,
            answer.json()["code"],
            error,
        )
    if grpc_address:
        with triton_grpc.InferenceServerClient(grpc_address) as grpc:
            answers["ready"] = (grpc.is_model_ready(model),)
            calls = {
                "metadata": partial(grpc.get_model_metadata, model),
                "config": partial(grpc.get_model_config, model),
                "infer": partial(grpc.infer, model, [fp32(1, 2)]),
            }
            for name, call in calls.items():
                status, message = failure(call)
                answers[name] = status, message.replace(model, "NAME")
    return answers
