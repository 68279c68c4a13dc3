"""The state in memory and in a file: stored, shared and never half-written."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.errors import StateUnavailable
from gateway.repository.state.content import CORDONS, MODELS, DesiredModel
from gateway.repository.state.interface import BadState
from gateway.repository.state.store import open_state_store
from tests.support.state_contract import (
    ID,
    LOADED,
    UNLOADED,
    Fresh,
    SharedStateContract,
    StateContract,
    is_leader,
    opened,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    return lambda: f"file://{tmp_path_factory.mktemp('state')}/state.json"


@pytest.fixture(scope="module", params=["memory", "file"])
def fresh(request: pytest.FixtureRequest, shared: Fresh) -> Fresh:
    return shared if request.param == "file" else lambda: "memory:"


class TestAnyState(StateContract):
    pass


class TestSharedState(SharedStateContract):
    pass


INVALID_ADDRESSES = (
    "",
    "state.json",
    "/var/lib/state.json",
    "memory:x",
    "memory://host",
    "file:",
    "file:state.json",
    "file://elsewhere/state.json",
    "file:///folder/",
    "file:///state%00.json",
    "file:///state.json?x=1",
    "file:///state.json#1",
    "postgres://me:hunter2@host/0",
    "redis:",
    "redis://:hunter2@/0",
    "redis://:hunter2@host:port/0",
    "redis://:hunter2@host:99999/0",
    "redis://:hunter2@host/first",
    "redis://:hunter2@host/0#1",
    "redis://:hun#ter2@host/0",
    "redis://:hun/ter2@host/0",
    "redis://[:hunter2@host/0",
    "redis://:hunter2\u2100@host/0",
    "redis://:hunter2@host/0?db=1",
    "redis://:hunter2@host/0?ssl_ca_certs=/ca.pem",
    "rediss://:hunter2@host/0?ssl_cert_reqs=none",
)


def test_invalid_address_is_refused_without_its_password(subtests: pytest.Subtests) -> None:
    for url in INVALID_ADDRESSES:
        with subtests.test(url):
            with pytest.raises(
                BadState, match="GATEWAY_STATE must be memory:, none:, file:"
            ) as error:
                open_state_store(url)
            text = "".join(traceback.format_exception(error.value))
            assert not any(secret in text for secret in ("hunter2", "ter2@", ":hun#"))
    with pytest.raises(BadState, match=r"file /nowhere/ca\.pem of ssl_ca_certs not found"):
        open_state_store("rediss://host/0?ssl_ca_certs=/nowhere/ca.pem")


# A file.


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_files_are_readable_by_this_user_only(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/new/folder/state.json") as (kept,):
        await kept.set_desired_model("core", DesiredModel(True, {"config": "a secret"}))
        await kept.record_operation(ID, {"state": "running"})
        assert await is_leader(kept)
    folder = tmp_path / "new" / "folder"
    assert mode(folder) == mode(folder / "state.json.operations") == 0o700
    assert {mode(path) for path in folder.rglob("*") if path.is_file()} == {0o600}
    document = json.loads((folder / "state.json").read_text())
    wish = {"loaded": True, "parameters": {"config": "a secret"}, "revision": 1}
    assert document == {"format": 1, "revision": 1, "models": {"core": wish}}


async def test_unused_state_holds_no_file_open(tmp_path: Path) -> None:
    def held() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [name for name in map(os.readlink, links) if name.startswith(str(tmp_path))]

    url = f"file://{tmp_path}/state.json"
    async with opened(url, 2) as (kept, _):
        await kept.set_desired_model("core", LOADED)
        await kept.read(MODELS)
        assert await is_leader(kept)
        assert held()
    unused = open_state_store(url)
    assert unused
    assert not held()


async def test_path_of_state_may_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "what? #1 & 100% ü" / "state.json"
    async with opened(f"file://localhost{quote(str(path))}") as (kept,):
        await kept.set_desired_model("core", LOADED)
    assert path.exists()


DAMAGED = {
    "nothing": b"",
    "half of it": b'{"format": 1, "revision": 3, "mod',
    "no UTF-8": b'{"format": 1, "revision": 3, "models": {"\xff": 1}}',
    "something else": b"[]",
    "no models": b'{"format": 1, "revision": 3}',
    "no format": b'{"revision": 3, "models": {}}',
    "no wish": b'{"format": 1, "revision": 3, "models": {"core": {"loaded": "yes"}}}',
    "a later format": b'{"format": 2, "revision": 3, "models": {}}',
}


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
@pytest.mark.parametrize("damage", DAMAGED)
async def test_damaged_file_is_reported_and_not_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.json"
    async with opened(f"file://{path}") as (kept,):
        await kept.set_desired_model("core", LOADED)
        await kept.read(MODELS)
        whole = path.read_bytes()
        path.write_bytes(DAMAGED[damage])
        with pytest.raises(StateUnavailable, match="read: the state file is damaged"):
            await kept.read(MODELS)
        with pytest.raises(StateUnavailable, match="written: the state file is damaged"):
            await kept.set_desired_model("core", UNLOADED)
        assert path.read_bytes() == DAMAGED[damage]
        # A gateway does not start with it.
        with pytest.raises(BadState) as refused:
            open_state_store(f"file://{path}")
        assert str(refused.value).startswith(f"GATEWAY_STATE: {path} is not a valid state file (")
        assert "move it away" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert path.read_bytes() == DAMAGED[damage]
        path.write_bytes(whole)
        assert await kept.read(MODELS) == {"core": DesiredModel(True, {}, 1)}


async def test_removed_file_is_an_empty_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    async with opened(f"file://{path}") as (kept,):
        await kept.set_desired_model("core", LOADED)
        await kept.read(MODELS)
        path.unlink()
        assert await kept.read(MODELS) == {}
        await kept.set_desired_model("text_core", LOADED)
        assert list(await kept.read(MODELS)) == ["text_core"]


def test_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/state.json", tmp_path / "file/deeper/state.json"):
        with pytest.raises(BadState) as refused:
            open_state_store(f"file://{path}")
        assert str(refused.value).startswith(f"GATEWAY_STATE: {path} cannot be used (")
        assert str(refused.value).endswith("; it needs a folder that this user can write to")
    with pytest.raises(BadState, match=r"cannot be used \(is a directory\)"):
        open_state_store(f"file://{tmp_path}")


async def test_folder_that_is_missing_for_a_while_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    async with opened(f"file://{folder}/state.json", 2) as (kept, other):
        await kept.set_desired_model("core", LOADED)
        assert await is_leader(kept)
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StateUnavailable, match="read: no such file"):
            await kept.read(MODELS)
        folder.touch()
        for change in (kept.set_desired_model("core", UNLOADED), kept.record_operation(ID, {})):
            with pytest.raises(StateUnavailable, match="written: not a directory"):
                await change
        for question in (kept.read(MODELS), kept.read_operation(ID)):
            with pytest.raises(StateUnavailable, match="read: not a directory"):
                await question
        assert await is_leader(kept)
        assert await is_leader(other)
        folder.unlink()
        (tmp_path / "elsewhere").rename(folder)
        assert await kept.read(MODELS) == {"core": DesiredModel(True, {}, 1)}
        assert [await is_leader(kept), await is_leader(other)] == [True, False]


async def test_changed_file_of_the_same_size_and_time_is_read_again(
    tmp_path: Path,
) -> None:
    """Two changes within a tick of the clock have the same time, and may have the same inode."""

    def change(revision: int) -> None:
        wish = {"loaded": True, "parameters": {}, "revision": revision}
        document = {"format": 1, "revision": revision, "models": {"core": wish}}
        new.write_text(json.dumps(document))
        os.utime(new, (1e9, 1e9))
        new.replace(path)

    path, new = tmp_path / "state.json", tmp_path / "new"
    async with opened(f"file://{path}") as (kept,):
        for revision in range(1000, 1100, 2):
            change(revision)
            change(revision + 1)
            assert (await kept.read(MODELS))["core"].revision == revision + 1


async def test_waiting_for_the_lock_does_not_block_the_loop_and_ends(tmp_path: Path) -> None:
    """It takes the 3 s for which a lock is waited for."""

    async with opened(f"file://{tmp_path}/state.json") as (kept,):
        with (tmp_path / "state.json.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = asyncio.create_task(kept.set_desired_model("core", LOADED))
            for _ in range(20):  # turns of the loop, which nothing holds up
                await asyncio.sleep(0)
                assert not waiting.done()
            with pytest.raises(StateUnavailable, match="another process holds its lock"):
                await waiting
        await kept.set_desired_model("core", LOADED)


async def test_removed_lease_gives_the_lead_to_one(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/state.json", 3) as several:
        assert await is_leader(several[0])
        (lease,) = (tmp_path / "state.json.leases").iterdir()
        lease.unlink()
        assert await is_leader(several[1])
        assert [await is_leader(kept) for kept in several] == [False, True, False]


async def test_operations_are_removed_after_an_hour(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/state.json") as (kept,):
        for number in range(3):
            await kept.record_operation(f"{number:032}", {"number": number})
        folder = tmp_path / "state.json.operations"
        ages_s = {"0" * 32: 3700, f"{1:032}": 3500}
        for name, age_s in ages_s.items():
            os.utime(folder / f"{name}.json", (time.time() - age_s,) * 2)
        await kept.record_operation(ID, {})
        assert await kept.read_operation("0" * 32) is None
        assert await kept.read_operation(f"{1:032}") == {"number": 1}
        assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damaged", [b"", b'{"a:8000": true}', b"[8000]", b'[["a:8000"]]'])
async def test_damaged_list_of_cordons_is_an_error(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "state.json"
    async with opened(f"file://{path}") as (kept,):
        await kept.write(CORDONS, ("a:8000",), True)
        (tmp_path / "state.json.cordons").write_bytes(damaged)
        with pytest.raises(StateUnavailable, match="read: the state file is damaged"):
            await kept.read(CORDONS)
