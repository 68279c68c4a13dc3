"""The state of several processes, killed ones, and ones without permission or disk space."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from gateway.repository.state.content import CONFIRMED, MODELS, EventId
from tests.support.redis_server import RedisServer
from tests.support.servers import ROOT
from tests.support.state import LOADED, is_leader, opened
from tests.support.wait import TIMEOUT_S, wait_until_async


@pytest.fixture(scope="module", name="server")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an unused state."""
    if request.param == "file":
        return f"file://{tmp_path}/state.db"
    server: RedisServer = request.getfixturevalue("server")
    return server.url()


STATE_IMPORTS = (
    "from gateway.repository.state.content import ALL, CONFIRMED, MODELS, DesiredModel\n"
    "from gateway.repository.state.interface import BadState\n"
    "from gateway.repository.state.places import open_state_store"
)


@contextmanager
def program(body: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run this in an async function of another process, which is killed at the end."""
    lines = textwrap.indent(body.strip(), "    ")
    imports = f"import asyncio, os, resource, sys\n{STATE_IMPORTS}"
    with subprocess.Popen(
        [
            *(sys.executable, "-c"),
            f"{imports}\nasync def main():\n{lines}\nasyncio.run(main())",
            *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


LEADER = """
store = open_state_store(sys.argv[1])
while True:
    print(await store.acquire_lease("fleet"), flush=True)
    await asyncio.sleep(0.1)
"""


async def test_leader_that_is_killed_is_replaced_within_seconds(url: str) -> None:
    """It takes the 5 s until the lease expires."""
    async with opened(url, 2) as several:

        async def led() -> bool:
            led = [await is_leader(kept) for kept in several]
            assert not all(led)
            return any(led)

        with program(LEADER, url) as leader:
            assert read_line(leader) == "True"
            assert not await led()
            leader.kill()
            await wait_until_async(led)
            assert await led()


WRITER = """
store = open_state_store(sys.argv[1])
name = sys.argv[2]
for turn in range(20):
    await store.set_desired_model(f"{name}-{turn}", DesiredModel(ALL, {"config": name * turn}))
    await store.set_desired_model("shared", DesiredModel(turn % 2))
    await store.append_event(b'{"%b":%d}' % (name.encode(), turn))
    assert (await store.add("caller", {"2026-11": 1000}, 1)).is_added
    await store.write(CONFIRMED, ("a:8000", "core"), None)
    await store.write(CONFIRMED, ("a:8000", "core"), "7")
    while not await store.acquire_lease("counter"):
        await asyncio.sleep(0.001)
    counted = await store.read_operation("0" * 32) or {"updated_at": 0}  # not atomic without the lease
    await store.record_operation("0" * 32, {"id": "0" * 32, "updated_at": counted["updated_at"] + 1})
    await store.release_lease("counter")
await store.close()
"""


async def test_three_writers_under_load_lose_nothing(url: str) -> None:
    with ExitStack() as writing:
        writers = [writing.enter_context(program(WRITER, url, name)) for name in "abc"]
        assert [writer.wait(TIMEOUT_S) for writer in writers] == [0] * 3
    async with opened(url) as (store,):
        models = await store.read(MODELS)
        names = {f"{name}-{turn}" for name in "abc" for turn in range(20)}
        assert set(models) == names | {"shared"}
        assert models["c-7"].parameters == {"config": "ccccccc"}
        assert len({model.revision for model in models.values()}) == len(models)
        assert len(await store.read_events(EventId(0), 100)) == 60
        assert (await store.add("caller", {"2026-11": 0}, 0)).used == (60,)
        assert await store.read_operation("0" * 32) == {"id": "0" * 32, "updated_at": 60}
        assert await store.read(CONFIRMED) == {"a:8000": {"core": "7"}}
        assert store.unreadable_counts.total() == 0


OPEN_AS_ANOTHER_USER = """
if os.getuid() == 0:
    os.setuid(65534)
try:
    open_state_store(sys.argv[1])
except BadState as exc:
    print(exc)
"""


def test_state_file_without_permission_is_an_error_that_names_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others can reach it
        path = Path(name) / "state.db"

        def open_as_another_user() -> str:
            with program(OPEN_AS_ANOTHER_USER, f"file://{path}") as other:
                return read_line(other)

        path.parent.chmod(0o555)
        assert (
            "state.db cannot be used (permission denied); it needs a folder"
            in open_as_another_user()
        )
        path.parent.chmod(0o777)
        path.touch(0o600)
        assert "state.db cannot be used (unable to open database file)" in open_as_another_user()
        path.chmod(0o444)
        assert "state.db cannot be used (attempt to write a readonly" in open_as_another_user()


FULL = """
store = open_state_store(sys.argv[1])
await store.set_desired_model("core", DesiredModel(ALL))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
large = "x" * 1_000_000
for change in (
    store.set_desired_model("large", DesiredModel(ALL, {"config": large})),
    store.record_operation("0" * 32, {"id": "0" * 32, "error": large}),
):
    try:
        await change
    except Exception as exc:
        print(exc.status, exc.code, exc.detail, flush=True)
print(list(await store.read(MODELS)), await store.read_operation("0" * 32), flush=True)
print(await store.set_desired_model("small", DesiredModel(0)), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(await store.set_desired_model("large", DesiredModel(ALL, {"config": large})), flush=True)
print(sorted(await store.read(MODELS)), flush=True)
await store.close()
"""


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
def test_full_disk_refuses_changes_and_keeps_the_state(tmp_path: Path) -> None:
    with program(FULL, f"file://{tmp_path}/state.db") as writer:
        for _ in range(2):
            line = read_line(writer)
            assert line.startswith(
                "503 STATE_UNAVAILABLE the desired state cannot be written: d"
            ), line
        assert read_line(writer) == "['core'] None"
        assert [read_line(writer) for _ in range(2)] == ["2", "3"]
        assert read_line(writer) == "['core', 'large', 'small']"
        assert writer.wait(TIMEOUT_S) == 0


ENDLESS = """
store = open_state_store(sys.argv[1])
turn = 0
while True:
    await store.set_desired_model("core", DesiredModel(ALL, {"config": "x" * 50_000, "turn": turn}))
    turn += 1
    print(turn, flush=True)
"""


@pytest.mark.long
@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
async def test_process_killed_while_it_writes_leaves_a_valid_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state.db"
    for pause_s in (0.0, 0.001, 0.003, 0.007):
        with program(ENDLESS, url) as writer:
            turn = int(read_line(writer)) - 1
            await asyncio.sleep(pause_s)
        async with opened(url) as (store,):
            model = (await store.read(MODELS))["core"]
            assert model.parameters["turn"] >= turn
            await store.set_desired_model("text_core", LOADED)
            await store.set_desired_model("core", None)


def test_redis_without_its_extra_names_the_package_to_install(tmp_path: Path) -> None:
    """The environment is this one without redis."""
    installed = Path(redis.__file__).parents[1]
    for path in installed.iterdir():
        if path.name != "redis":
            (tmp_path / path.name).symlink_to(path)
    code = (
        f"{STATE_IMPORTS}\n"
        "open_state_store('memory:')\n"
        "try: open_state_store('redis://host')\n"
        "except BadState as exc: print(exc)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert ended.stdout == (
        "GATEWAY_STATE uses Redis, which requires: pip install 'triton-gateway[redis]'\n"
    ), ended.stderr
