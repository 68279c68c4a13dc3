"""The addresses of states, and the files of a state on a disk."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.config.settings import Settings
from gateway.errors import StateUnavailable
from gateway.repository.state.content import ALL, CORDONS, MODELS, DesiredModel
from gateway.repository.state.interface import BadState
from gateway.repository.state.places import open_configured_store, open_state_store
from tests.support.state import ID, LOADED, UNLOADED, is_leader, opened

INVALID_ADDRESSES = (
    "",
    "state.db",
    "/var/lib/state.db",
    "memory:x",
    "memory://host",
    "file:",
    "file:state.db",
    "file://elsewhere/state.db",
    "file:///folder/",
    "file:///state%00.db",
    "file:///state.db?x=1",
    "file:///state.db#1",
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


# Paths at which no state can be, and the reason.
UNUSABLE = {
    "state.json": "ends in .json, but the state is a database: name it state.db, and import an exported",
    "file/state.db": "cannot be used (file exists); it needs a folder",
    "file/deeper/state.db": "cannot be used (not a directory); it needs a folder",
    "folder": "cannot be used (unable to open database file); it needs a folder",
    "text.db": "cannot be used (file is not a database); it needs a folder",
    "log.db": "cannot be used (disk i/o error); it needs a folder",
}


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_path_is_refused_with_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text('{"format": 1, "models": {}}')
    (tmp_path / "log.db-wal").mkdir()
    with pytest.raises(BadState) as refused:
        open_state_store(f"file://{tmp_path}/{name}")
    assert str(refused.value).startswith(f"GATEWAY_STATE: {tmp_path}/{name} {UNUSABLE[name]}")
    assert "\n" not in str(refused.value)
    assert (tmp_path / "text.db").read_text() == '{"format": 1, "models": {}}'


def test_without_a_writable_folder_the_start_names_a_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/self")
    with pytest.raises(
        BadState, match="; mount a volume at /proc/self/triton-gateway, set GATEWAY_STATE to"
    ):
        open_configured_store(Settings())


async def test_files_are_readable_by_this_user_only(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/new/folder/state.db") as (store,):
        await store.set_desired_model("core", DesiredModel(ALL, {"config": "a secret"}))
        folder = tmp_path / "new" / "folder"
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == {f"state.db{end}": 0o600 for end in ("", "-wal", "-shm")}


async def test_unused_state_holds_no_file_open(tmp_path: Path) -> None:
    def held() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [name for name in map(os.readlink, links) if name.startswith(str(tmp_path))]

    url = f"file://{tmp_path}/state.db"
    async with opened(url, 2) as (store, _):
        assert not held()
        await store.set_desired_model("core", LOADED)
        assert held()
    assert not held()


async def test_path_of_state_may_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "what? #1 & 100% ü" / "state.db"
    async with opened(f"file://localhost{quote(str(path))}") as (store,):
        await store.set_desired_model("core", LOADED)
    assert path.exists()


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
async def test_file_that_is_damaged_or_away_for_a_while_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    url = f"file://{folder}/state.db"
    async with opened(url, 2) as (store, other):
        await store.set_desired_model("core", LOADED)
        assert await is_leader(store)
        for reason in ("no such file or directory", "file is not a database"):
            folder.rename(tmp_path / "elsewhere")
            if "not a" in reason:
                folder.mkdir()
                (folder / "state.db").write_text("text " * 200)
            for action, call in (
                ("read", store.read(MODELS)),
                ("read", store.read_operation(ID)),
                ("written", store.set_desired_model("core", UNLOADED)),
                ("written", store.write(CORDONS, ("a:8000",), True)),
                ("written", store.record_operation(ID, {})),
            ):
                with pytest.raises(StateUnavailable, match=f"cannot be {action}: {reason}"):
                    await call
            assert not store.is_available
            assert [await is_leader(store), await is_leader(other)] == [True, True]
            (folder / "state.db").unlink(missing_ok=True)
            if folder.exists():
                folder.rmdir()
            (tmp_path / "elsewhere").rename(folder)
            assert await store.read(MODELS) == {"core": DesiredModel(ALL, {}, 1)}
        assert [await is_leader(store), await is_leader(other)] == [True, False]
        assert store.loss_count == 0


async def test_waiting_for_a_lock_does_not_block_the_loop_and_ends(tmp_path: Path) -> None:
    """It takes the 3 s for which a lock is waited for."""
    path = tmp_path / "state.db"
    async with opened(f"file://{path}") as (store,):
        await store.set_desired_model("core", LOADED)
        locking = sqlite3.connect(path, isolation_level=None)
        locking.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.set_desired_model("core", UNLOADED))
        for _ in range(20):  # turns of the loop, which nothing holds up
            await asyncio.sleep(0)
            assert not waiting.done()
        with pytest.raises(StateUnavailable, match="written: database is locked"):
            await waiting
        locking.close()
        assert await store.read(MODELS) == {"core": DesiredModel(ALL, {}, 1)}
        await store.set_desired_model("core", UNLOADED)


async def test_operations_are_removed_when_they_expire(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with opened(f"file://{path}") as (store,):
        for number in range(3):
            await store.record_operation(f"{number:032}", {"id": f"{number:032}"})
        with sqlite3.connect(path, isolation_level=None) as database:
            age = "UPDATE expiring SET expires_at = expires_at - ? WHERE key = ?"
            database.execute(age, (3700.0, f"operation:{0:032}"))
            database.execute(age, (3500.0, f"operation:{1:032}"))
            await store.record_operation(ID, {"id": ID})
            await store.acquire_lease("leader")
            operations = "SELECT key FROM expiring WHERE key LIKE 'operation:%'"
            keys = database.execute(operations).fetchall()
        database.close()
        assert await store.read_operation(f"{0:032}") is None
        assert await store.read_operation(f"{1:032}") == {"id": f"{1:032}"}
        assert {key for (key,) in keys} == {
            f"operation:{each}" for each in (f"{1:032}", f"{2:032}", ID)
        }
