"""The state with several processes, killed ones, and ones without permission or disk space."""

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

from gateway.repository.state.content import MODELS
from tests.support.redis_server import RedisServer
from tests.support.servers import ROOT
from tests.support.state_contract import LOADED, is_leader, opened
from tests.support.wait import TIMEOUT_S, wait_until_async


@pytest.fixture(scope="module", name="server")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an unused state."""
    if request.param == "file":
        return f"file://{tmp_path}/state.json"
    server: RedisServer = request.getfixturevalue("server")
    return server.url()


STATE_IMPORTS = (
    "from gateway.repository.state.content import MODELS, DesiredModel\n"
    "from gateway.repository.state.interface import BadState\n"
    "from gateway.repository.state.store import open_state_store"
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
kept = open_state_store(sys.argv[1])
while True:
    print(await kept.acquire_lease("leader"), flush=True)
    await asyncio.sleep(0.1)
"""


async def test_leader_that_is_killed_is_replaced_within_seconds(url: str) -> None:
    """In Redis it takes the 5 s until the lease expires."""
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
kept = open_state_store(sys.argv[1])
for turn in range(int(sys.argv[3])):
    await kept.set_desired_model(f"{sys.argv[2]}-{turn}", DesiredModel(True, {"config": sys.argv[2] * turn}))
    await kept.set_desired_model("shared", DesiredModel(turn % 2 == 0))
await kept.close()
"""


async def test_concurrent_changes_of_several_processes_are_all_kept(url: str) -> None:
    with ExitStack() as writing:
        writers = [writing.enter_context(program(WRITER, url, name, "20")) for name in "abc"]
        assert [writer.wait(TIMEOUT_S) for writer in writers] == [0] * 3
    async with opened(url) as (kept,):
        wishes = await kept.read(MODELS)
        assert set(wishes) == {f"{name}-{turn}" for name in "abc" for turn in range(20)} | {
            "shared"
        }
        assert wishes["c-7"].parameters == {"config": "ccccccc"}
        assert len({wish.revision for wish in wishes.values()}) == len(wishes)
        assert await kept.set_desired_model("last", LOADED) == 2 * 3 * 20 + 1


OPEN_AS_ANOTHER_USER = """
if os.getuid() == 0:
    os.setuid(65534)
try:
    open_state_store(sys.argv[1])
except BadState as exc:
    print(exc)
"""


def test_state_file_without_permission_is_an_error_that_names_it() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "state.json"
        lock = path.with_suffix(".json.lock")

        def open_as_another_user() -> str:
            with program(OPEN_AS_ANOTHER_USER, f"file://{path}") as other:
                return read_line(other)

        needs_folder = "state.json cannot be used (permission denied); it needs a folder"
        path.parent.chmod(0o555)
        assert needs_folder in open_as_another_user()
        path.parent.chmod(0o755)
        lock.touch()
        lock.chmod(0o666)
        path.parent.chmod(0o555)
        assert needs_folder in open_as_another_user()
        path.parent.chmod(0o777)
        path.touch(0)
        assert "state.json cannot be used (permission denied)" in open_as_another_user()


FULL = """
kept = open_state_store(sys.argv[1])
await kept.set_desired_model("core", DesiredModel(True))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for change in (
    kept.set_desired_model("large", DesiredModel(True, {"config": "x" * 1000})),
    kept.record_operation("0" * 32, {"large": "x" * 1000}),
):
    try:
        await change
    except Exception as exc:
        print(exc.status, exc.code, exc.detail, flush=True)
print(list(await kept.read(MODELS)), await kept.read_operation("0" * 32), flush=True)
sys.stdin.readline()
await kept.set_desired_model("small", DesiredModel(False))
await kept.record_operation("0" * 32, {"small": 1})
print(list(await kept.read(MODELS)), await kept.read_operation("0" * 32), flush=True)
await kept.close()
"""


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
def test_full_disk_refuses_changes_and_keeps_the_state(tmp_path: Path) -> None:
    with program(FULL, f"file://{tmp_path}/state.json") as writer:
        for _ in range(2):
            assert read_line(writer) == (
                "503 STATE_UNAVAILABLE the desired state cannot be written: file too large"
            )
        assert read_line(writer) == "['core'] None"
        names = {path.name for path in tmp_path.rglob("*")}
        assert names == {f"state.json{end}" for end in ("", ".lock", ".operations")}
        assert writer.stdin is not None
        writer.stdin.close()
        assert read_line(writer) == "['core', 'small'] {'small': 1}"
        assert writer.wait(TIMEOUT_S) == 0


ENDLESS = """
kept = open_state_store(sys.argv[1])
turn = 0
while True:
    await kept.set_desired_model("core", DesiredModel(True, {"config": "x" * 50_000, "turn": turn}))
    turn += 1
    print(turn, flush=True)
"""


@pytest.mark.long
@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
async def test_process_killed_while_it_writes_leaves_a_valid_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/state.json"
    for pause_s in (0.0, 0.001, 0.003, 0.007):
        with program(ENDLESS, url) as writer:
            turn = int(read_line(writer)) - 1
            await asyncio.sleep(pause_s)
        async with opened(url) as (kept,):
            wish = (await kept.read(MODELS))["core"]
            assert wish.parameters["turn"] >= turn
            await kept.set_desired_model("text_core", LOADED)
            await kept.set_desired_model("core", None)


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
