"""What the API asked of models: kept, shared and never half-written, on real disks and a real Redis."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import trustme
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import StateUnavailable
from gateway.state.store import store
from gateway.state.wishes import BadState, Store, Wish
from tests.support.redis_server import RedisServer, redis_server
from tests.support.servers import ROOT, free_ports

Scenario = Coroutine[Any, Any, None]
ID = "0123456789abcdef" * 2
LOADED, UNLOADED = Wish(True), Wish(False)


@pytest.fixture(scope="module", name="server")
def server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


Fresh = Callable[[], str]  # the address of a state that nobody has used


def addresses(request: pytest.FixtureRequest) -> Fresh:
    if request.param == "memory":
        return lambda: "memory:"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return server.url
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return lambda: f"file://{folders.mktemp('state')}/state.json"


@pytest.fixture(scope="module", params=["memory", "file", "redis"])
def fresh(request: pytest.FixtureRequest) -> Fresh:
    return addresses(request)


@pytest.fixture(scope="module", params=["file", "redis"])
def shared(request: pytest.FixtureRequest) -> Fresh:
    return addresses(request)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    loop: Callable[[Scenario], None] = request.param
    return loop


@asynccontextmanager
async def opened(url: str, count: int = 1) -> AsyncIterator[list[Store]]:
    """This many processes' views of one state, as far as one process can have them."""
    kept = [store(url) for _ in range(count)]
    try:
        yield kept
    finally:
        for one in kept:
            await one.close()


@contextmanager
def program(body: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that does this, in an async function; gone afterwards."""
    lines = textwrap.indent(body.strip(), "    ")
    imports = "import asyncio, os, resource, sys\nfrom gateway.state.store import *"
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


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def within(seconds: float, holds: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    begun = time.monotonic()
    while not await holds():
        assert time.monotonic() - begun < seconds
        await asyncio.sleep(0.02)


# Any state.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
WISHES = st.dictionaries(
    st.text(),
    st.builds(Wish, st.booleans(), st.dictionaries(st.text(), JSON, max_size=3)),
    max_size=5,
)


@given(wishes=WISHES)
@settings(max_examples=30, deadline=None)
def test_any_wish_of_any_model_is_read_as_it_was_kept(
    shared: Fresh, wishes: dict[str, Wish]
) -> None:
    async def scenario() -> None:
        async with opened(shared(), 2) as (one, other):
            for model, wish in wishes.items():
                await one.wish(model, wish)
            for kept in (one, other):
                found = await kept.wishes()
                assert {name: replace(wish, revision=0) for name, wish in found.items()} == wishes

    asyncio.run(scenario())


def test_a_forgotten_wish_is_gone(fresh: Fresh) -> None:
    async def scenario() -> None:
        async with opened(fresh()) as (kept,):
            await kept.wish("core", LOADED)
            await kept.wish("text_core", UNLOADED)
            await kept.wish("core", None)
            await kept.wish("nobody knows it", None)
            assert list(await kept.wishes()) == ["text_core"]

    asyncio.run(scenario())


def test_a_wish_that_is_repeated_has_a_higher_revision(fresh: Fresh) -> None:
    async def scenario() -> None:
        async with opened(fresh()) as (kept,):
            given = []
            for wish in (LOADED, LOADED, None, LOADED, UNLOADED):
                given.append(await kept.wish("core", wish))
                found = (await kept.wishes()).get("core")
                assert found == (wish and replace(wish, revision=given[-1]))
            assert given == sorted(set(given))

    asyncio.run(scenario())


def test_an_operation_is_read_as_it_was_last_recorded(fresh: Fresh) -> None:
    async def scenario() -> None:
        async with opened(fresh()) as (kept,):
            assert await kept.operation(ID) is None
            await kept.record(ID, {"state": "running", "replicas": {}})
            last = {"state": "succeeded", "replicas": {"a:8000": "READY"}}
            await kept.record(ID, last)
            assert await kept.operation(ID) == last
            assert await kept.operation(ID[::-1]) is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "name", ["", "../state", "A" * 32, "0" * 31, f"{ID}\n", f"{ID}/x", "٣" * 32, "\0" * 32]
)
def test_what_is_no_id_of_an_operation_is_not_looked_for(fresh: Fresh, name: str) -> None:
    async def scenario() -> None:
        async with opened(fresh()) as (kept,):
            assert await kept.operation(name) is None
            with pytest.raises(ValueError, match="32 hexadecimal"):
                await kept.record(name, {})

    asyncio.run(scenario())


def test_who_is_alone_leads(fresh: Fresh) -> None:
    async def scenario() -> None:
        async with opened(fresh()) as (one,):
            assert [await one.leads(), await one.leads()] == [True, True]

    asyncio.run(scenario())


def test_what_one_keeps_another_reads(shared: Fresh) -> None:
    async def scenario() -> None:
        async with opened(shared(), 2) as (one, other):
            assert await other.wishes() == {}
            await one.wish("core", Wish(True, {"config": "{}"}))
            await one.record(ID, {"state": "running"})
            assert await other.wishes() == await one.wishes()
            assert await other.operation(ID) == {"state": "running"}

    asyncio.run(scenario())


def test_what_has_not_changed_is_not_read_again(shared: Fresh) -> None:
    async def scenario() -> None:
        async with opened(shared(), 2) as (writer, reader):
            await writer.wish("core", LOADED)
            found = await reader.wishes()
            assert await reader.wishes() is found
            await writer.wish("core", LOADED)
            assert await reader.wishes() is not found

    asyncio.run(scenario())


def test_exactly_one_of_several_leads_and_another_once_it_closes(shared: Fresh) -> None:
    async def scenario() -> None:
        async with opened(url, 3) as several:
            async with opened(url) as (first,):
                assert await first.leads()
                for _ in range(3):
                    assert not any([await kept.leads() for kept in several])
                    assert await first.leads()
            for _ in range(3):
                assert [await kept.leads() for kept in several] == [True, False, False]

    url = shared()
    asyncio.run(scenario())


LEADER = """
kept = store(sys.argv[1])
while True:
    print(await kept.leads(), flush=True)
    await asyncio.sleep(0.1)
"""


def test_when_the_leader_is_killed_another_leads_within_seconds(shared: Fresh) -> None:
    async def scenario() -> None:
        async with opened(url, 2) as several:

            async def led() -> bool:
                led = [await kept.leads() for kept in several]
                assert not all(led)
                return any(led)

            with program(LEADER, url) as leader:
                assert said(leader) == "True"
                assert not await led()
                leader.kill()
                await within(7, led)
                assert await led()

    url = shared()
    asyncio.run(scenario())


WRITER = """
kept = store(sys.argv[1])
for turn in range(int(sys.argv[3])):
    await kept.wish(f"{sys.argv[2]}-{turn}", Wish(True, {"config": sys.argv[2] * turn}))
    await kept.wish("shared", Wish(turn % 2 == 0))
await kept.close()
"""


def test_no_change_is_lost_when_several_processes_make_them(shared: Fresh) -> None:
    async def scenario() -> None:
        async with opened(url) as (kept,):
            wishes = await kept.wishes()
            assert set(wishes) == {f"{name}-{turn}" for name in "abcd" for turn in range(20)} | {
                "shared"
            }
            assert wishes["c-7"].parameters == {"config": "ccccccc"}
            assert len({wish.revision for wish in wishes.values()}) == len(wishes)
            assert await kept.wish("last", LOADED) == 2 * 4 * 20 + 1

    url = shared()
    with ExitStack() as writing:
        writers = [writing.enter_context(program(WRITER, url, name, "20")) for name in "abcd"]
        assert [writer.wait(30) for writer in writers] == [0] * 4
    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url",
    [
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
    ],
)
def test_what_is_no_address_of_a_state_is_refused_without_telling_it(url: str) -> None:
    with pytest.raises(BadState, match="GATEWAY_STATE is none of memory:, file:") as refused:
        store(url)
    told = "".join(traceback.format_exception(refused.value))
    assert not any(secret in told for secret in ("hunter2", "ter2@", ":hun#"))


# A file.


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_file_and_its_folder_are_for_this_user_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{tmp_path}/new/folder/state.json") as (kept,):
            await kept.wish("core", Wish(True, {"config": "a secret"}))
            await kept.record(ID, {"state": "running"})
            assert await kept.leads()

    asyncio.run(scenario())
    folder = tmp_path / "new" / "folder"
    assert mode(folder) == mode(folder / "state.json.operations") == 0o700
    assert {mode(path) for path in folder.rglob("*") if path.is_file()} == {0o600}
    document = json.loads((folder / "state.json").read_text())
    wish = {"loaded": True, "parameters": {"config": "a secret"}, "revision": 1}
    assert document == {"format": 1, "revision": 1, "models": {"core": wish}}


def test_a_state_that_is_not_used_yet_or_no_more_holds_no_file_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(url, 2) as (kept, _):
            await kept.wish("core", LOADED)
            await kept.wishes()
            assert await kept.leads()
            assert held()

    def held() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [name for name in map(os.readlink, links) if name.startswith(str(tmp_path))]

    url = f"file://{tmp_path}/state.json"
    asyncio.run(scenario())
    unused = store(url)
    assert unused
    assert not held()


def test_a_path_may_hold_what_a_url_must_quote(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://localhost{quote(str(path))}") as (kept,):
            await kept.wish("core", LOADED)

    path = tmp_path / "what? #1 & 100% ü" / "state.json"
    asyncio.run(scenario())
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


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(BadState) as refused:
        store(f"file://{path}")
    assert str(refused.value).startswith(
        f"GATEWAY_STATE: {path} is not the state of a gateway (it "
    )
    assert "move it away" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == DAMAGED[damage]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_is_damaged_later_is_not_written_over(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        async with opened(f"file://{path}") as (kept,):
            await kept.wish("core", LOADED)
            await kept.wishes()
            whole = path.read_bytes()
            path.write_bytes(DAMAGED[damage])
            with pytest.raises(StateUnavailable, match="read now: the state file is damaged"):
                await kept.wishes()
            with pytest.raises(StateUnavailable, match="kept now: the state file is damaged"):
                await kept.wish("core", UNLOADED)
            assert path.read_bytes() == DAMAGED[damage]
            path.write_bytes(whole)
            assert await kept.wishes() == {"core": Wish(True, {}, 1)}

    path = tmp_path / "state.json"
    asyncio.run(scenario())


def test_a_file_that_is_taken_away_is_a_state_with_nothing_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{path}") as (kept,):
            await kept.wish("core", LOADED)
            await kept.wishes()
            path.unlink()
            assert await kept.wishes() == {}
            await kept.wish("text_core", LOADED)
            assert list(await kept.wishes()) == ["text_core"]

    path = tmp_path / "state.json"
    asyncio.run(scenario())


@pytest.mark.parametrize("below", ["state.json", "deeper/state.json"])
def test_a_folder_that_cannot_be_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below
    with pytest.raises(BadState) as refused:
        store(f"file://{path}")
    assert str(refused.value).startswith(f"GATEWAY_STATE: {path} cannot be used (")
    assert str(refused.value).endswith("; it needs a folder where this user may write")


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadState, match=r"cannot be used \(is a directory\)"):
        store(f"file://{tmp_path}")


ANYBODY = """
if os.getuid() == 0:
    os.setuid(65534)
try:
    store(sys.argv[1])
except BadState as exc:
    print(exc)
"""


@pytest.mark.parametrize("used_before", [False, True])
def test_a_folder_where_this_user_may_not_write_is_told(used_before: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if used_before:
            (folder / "state.json.lock").touch()
            (folder / "state.json.lock").chmod(0o666)
        folder.chmod(0o555)
        with program(ANYBODY, f"file://{folder}/state.json") as other:
            assert "state.json cannot be used (permission denied); it needs a folder" in said(other)
        folder.chmod(0o755)


def test_a_file_that_this_user_may_not_read_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "state.json").touch(0)
        with program(ANYBODY, f"file://{folder}/state.json") as other:
            assert "state.json cannot be used (permission denied)" in said(other)


def test_a_folder_that_is_lost_later_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{folder}/state.json", 2) as (kept, other):
            await kept.wish("core", LOADED)
            assert await kept.leads()
            folder.rename(tmp_path / "elsewhere")
            folder.touch()
            for change in (kept.wish("core", UNLOADED), kept.record(ID, {})):
                with pytest.raises(StateUnavailable, match="kept now: not a directory"):
                    await change
            for question in (kept.wishes(), kept.operation(ID)):
                with pytest.raises(StateUnavailable, match="read now: not a directory"):
                    await question
            assert await kept.leads()
            assert await other.leads()
            folder.unlink()
            (tmp_path / "elsewhere").rename(folder)
            assert await kept.wishes() == {"core": Wish(True, {}, 1)}
            assert [await kept.leads(), await other.leads()] == [True, False]

    folder = tmp_path / "folder"
    asyncio.run(scenario())


FULL = """
kept = store(sys.argv[1])
await kept.wish("core", Wish(True))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for change in (
    kept.wish("large", Wish(True, {"config": "x" * 1000})),
    kept.record("0" * 32, {"large": "x" * 1000}),
):
    try:
        await change
    except Exception as exc:
        print(exc.status, exc.code, exc.detail, flush=True)
print(list(await kept.wishes()), await kept.operation("0" * 32), flush=True)
sys.stdin.readline()
await kept.wish("small", Wish(False))
await kept.record("0" * 32, {"small": 1})
print(list(await kept.wishes()), await kept.operation("0" * 32), flush=True)
await kept.close()
"""


def test_a_disk_that_is_full_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    with program(FULL, f"file://{tmp_path}/state.json") as writer:
        for _ in range(2):
            assert said(writer) == (
                "503 STATE_UNAVAILABLE what the API asked of models cannot be kept now: file too large"
            )
        assert said(writer) == "['core'] None"
        names = {path.name for path in tmp_path.rglob("*")}
        assert names == {f"state.json{end}" for end in ("", ".lock", ".operations")}
        assert writer.stdin is not None
        writer.stdin.close()
        assert said(writer) == "['core', 'small'] {'small': 1}"
        assert writer.wait(10) == 0


ENDLESS = """
kept = store(sys.argv[1])
turn = 0
while True:
    await kept.wish("core", Wish(True, {"config": "x" * 50_000, "turn": turn}))
    turn += 1
    print(turn, flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(url) as (kept,):
            wish = (await kept.wishes())["core"]
            assert wish.parameters["turn"] >= turn
            await kept.wish("text_core", LOADED)
            await kept.wish("core", None)

    url = f"file://{tmp_path}/state.json"
    for pause_s in (0.0, 0.001, 0.003, 0.007):
        with program(ENDLESS, url) as writer:
            turn = int(said(writer)) - 1
            time.sleep(pause_s)
        asyncio.run(scenario())


def test_every_change_is_seen_however_quickly_it_follows_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{tmp_path}/state.json", 2) as (writer, reader):
            for turn in range(1000, 1100):
                await writer.wish("core", Wish(True, {"turn": turn}))
                assert (await reader.wishes())["core"].parameters == {"turn": turn}

    asyncio.run(scenario())


def test_a_file_of_the_same_size_and_time_is_not_taken_for_the_one_that_was_read(
    tmp_path: Path,
) -> None:
    """As two changes within a tick of the clock are, when the second gets the inode of the first."""

    def change(revision: int) -> None:
        wish = {"loaded": True, "parameters": {}, "revision": revision}
        document = {"format": 1, "revision": revision, "models": {"core": wish}}
        new.write_text(json.dumps(document))
        os.utime(new, (1e9, 1e9))
        new.replace(path)

    async def scenario() -> None:
        async with opened(f"file://{path}") as (kept,):
            for revision in range(1000, 1100, 2):
                change(revision)
                change(revision + 1)
                assert (await kept.wishes())["core"].revision == revision + 1

    path, new = tmp_path / "state.json", tmp_path / "new"
    asyncio.run(scenario())


def test_who_waits_for_the_lock_waits_beside_the_loop_and_not_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{tmp_path}/state.json") as (kept,):
            with (tmp_path / "state.json.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                waiting = asyncio.create_task(kept.wish("core", LOADED))
                longest_s = 0.0
                while not waiting.done():
                    before = time.monotonic()
                    await asyncio.sleep(0.01)
                    longest_s = max(longest_s, time.monotonic() - before)
            with pytest.raises(StateUnavailable, match="another process holds its lock"):
                await waiting
            assert longest_s < 1
            await kept.wish("core", LOADED)

    asyncio.run(scenario())


def test_a_lock_file_that_is_removed_gives_the_lead_to_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{tmp_path}/state.json", 3) as several:
            assert await several[0].leads()
            (tmp_path / "state.json.leader").unlink()
            assert await several[1].leads()
            assert [await kept.leads() for kept in several] == [False, True, False]

    asyncio.run(scenario())


def test_operations_of_more_than_an_hour_ago_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"file://{tmp_path}/state.json") as (kept,):
            for number in range(3):
                await kept.record(f"{number:032}", {"number": number})
            folder = tmp_path / "state.json.operations"
            ages_s = {"0" * 32: 3700, f"{1:032}": 3500}
            for name, age_s in ages_s.items():
                os.utime(folder / f"{name}.json", (time.time() - age_s,) * 2)
            await kept.record(ID, {})
            assert await kept.operation("0" * 32) is None
            assert await kept.operation(f"{1:032}") == {"number": 1}
            assert len(list(folder.iterdir())) == 3

    asyncio.run(scenario())


# Redis.


def test_redis_may_be_away_at_the_start_and_later(
    tmp_path: Path, run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def away(kept: Store) -> None:
        begun = time.monotonic()
        for question in (kept.wishes(), kept.operation(ID)):
            with pytest.raises(StateUnavailable, match="read now: Redis cannot be reached"):
                await question
        for change in (kept.wish("core", LOADED), kept.record(ID, {})):
            with pytest.raises(StateUnavailable, match="kept now: Redis cannot be reached"):
                await change
        assert await kept.leads()
        assert time.monotonic() - begun < 1

    async def back(kept: Store, loaded: bool) -> None:
        server.start()
        assert await kept.wishes() == {}  # this Redis keeps nothing on a disk
        await kept.wish("core", Wish(loaded))
        assert (await kept.wishes())["core"].loaded == loaded
        assert await kept.leads()

    async def scenario() -> None:
        async with opened(server.url(), 2) as several:
            for loaded in (True, False, True):
                for kept in several:
                    await away(kept)
                await back(several[0], loaded)
                assert (await several[1].wishes())["core"].loaded == loaded
                assert not await several[1].leads()
                server.kill()

    caplog.set_level(logging.INFO)
    with redis_server(tmp_path) as server:
        server.kill()
        run(scenario())
    told = [
        record.getMessage() for record in caplog.records if record.name.startswith("gateway.state.")
    ]
    place = f"the state at redis://127.0.0.1:{server.port}/0"
    # Each of the two stores loses it three times and tells it once each time, not each time it asks.
    assert told.count(f"{place} cannot be read: Redis cannot be reached") == 6
    assert told.count(f"{place} can be read again") == 6


def test_a_redis_that_hangs_is_not_waited_for(
    tmp_path: Path, run: Callable[[Scenario], None]
) -> None:
    async def scenario() -> None:
        async with opened(server.url(), 2) as (used, new):
            await used.wish("core", LOADED)
            server.signal(signal.SIGSTOP)
            begun = time.monotonic()
            for answers in await asyncio.gather(asked(used), asked(new)):
                assert [type(answer) for answer in answers] == [StateUnavailable] * 3 + [bool]
                assert "Redis does not answer" in str(answers[0])
            assert time.monotonic() - begun < 2.5
            server.signal(signal.SIGCONT)
            await used.wish("core", LOADED)
            assert (await new.wishes())["core"].loaded

    async def asked(kept: Store) -> list[Any]:
        questions = (kept.wishes(), kept.wish("core", UNLOADED), kept.operation(ID))
        return [*await asyncio.gather(*questions, kept.leads(), return_exceptions=True)]

    with redis_server(tmp_path) as server:
        run(scenario())


def test_a_gateway_ends_in_time_when_redis_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        url = server.url()
        async with opened(url) as (leader,):
            assert await leader.leads()
            async with opened(url) as (other,):
                assert not await other.leads()
                server.signal(signal.SIGSTOP)
                begun = time.monotonic()
            assert time.monotonic() - begun < 0.5
        assert time.monotonic() - begun < 2.5
        server.signal(signal.SIGCONT)

    with redis_server(tmp_path) as server:
        asyncio.run(scenario())


@asynccontextmanager
async def stranger(answer: bytes, *then: bytes, pause_s: float = 0) -> AsyncIterator[str]:
    """The address of what is no Redis: it answers the first line, and goes on after each pause."""
    answering: set[asyncio.Task[None] | None] = set()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        with suppress(OSError):
            await reader.readline()
            writer.write(answer)
            for piece in then:
                await asyncio.sleep(pause_s)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, answering))


def test_answers_that_all_come_late_are_not_waited_for_one_after_the_other() -> None:
    async def scenario() -> None:
        late = stranger(b"", *[b"+OK\r\n"] * 8, pause_s=0.8)
        async with late as url, opened(f"{url}/1".replace("//", "//:password@")) as (kept,):
            begun = time.monotonic()
            with pytest.raises(StateUnavailable, match="Redis does not answer"):
                await kept.wishes()
            assert time.monotonic() - begun < 3.5

    asyncio.run(scenario())


def test_what_answers_and_is_no_redis_is_told(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        async with stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, opened(url) as (kept,):
            with pytest.raises(StateUnavailable, match="what answers there is not Redis"):
                await kept.wishes()
            assert await kept.leads()

    run(scenario())


def test_connections_that_redis_has_closed_are_made_again(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(server.url()) as (kept,):
            await asyncio.gather(*(kept.wishes() for _ in range(5)))
            with server.client() as client:
                assert client.client_kill_filter(_type="normal", skipme=True) >= 5
            for _ in range(6):
                await kept.wishes()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--requirepass", "another one"], "Redis does not know this user or password"),
        # It quotes the arguments of a command that it does not know.
        (["--rename-command", "AUTH", ""], "Redis refuses a command"),
    ],
)
def test_a_password_is_never_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: list[str], reason: str
) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as (kept,):
            with pytest.raises(StateUnavailable) as refused:
                await kept.wishes()
            assert refused.value.detail.endswith(f"cannot be read now: {reason}")
            assert "hunter2" not in "".join(traceback.format_exception(refused.value))

    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, *options) as server:
        for user in ("", "me"):
            asyncio.run(scenario(server.url().replace("//", f"//{user}:hunter2%23@")))
    assert f"127.0.0.1:{server.port}/0 cannot be read: {reason}" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_password_may_hold_anything(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as (kept,):
            await kept.wish("core", LOADED)
            assert "core" in await kept.wishes()

    with redis_server(tmp_path, "--requirepass", "#/?@:%ü") as server:
        asyncio.run(scenario(server.url().replace("//", f"//:{quote('#/?@:%ü', safe='')}@")))


def test_tls_is_used_and_checked(tmp_path: Path) -> None:
    async def scenario(authority: Path, reason: str) -> None:
        url = server.url(ssl_ca_certs=str(authority)).replace("redis://", "rediss://")
        async with opened(url) as (kept,):
            if reason:
                with pytest.raises(StateUnavailable, match=reason):
                    await kept.wish("core", LOADED)
            else:
                await kept.wish("core", LOADED)
                assert "core" in await kept.wishes()

    for name in ("ours", "theirs"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / f"{name}.pem")
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.crt")
    options = (
        *("--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(tmp_path / "ours.crt")),
        *("--tls-key-file", str(tmp_path / "ours.key")),
        *("--tls-ca-cert-file", str(tmp_path / "ours.pem")),
    )
    with redis_server(tmp_path, *options) as server:
        asyncio.run(scenario(tmp_path / "ours.pem", ""))
        asyncio.run(scenario(tmp_path / "theirs.pem", "Redis cannot be reached"))


def test_a_file_for_tls_that_is_not_there_is_told() -> None:
    with pytest.raises(BadState, match=r"there is no file /nowhere/ca\.pem for ssl_ca_certs"):
        store("rediss://host/0?ssl_ca_certs=/nowhere/ca.pem")


def test_a_copy_of_redis_is_read_and_told_when_it_cannot_be_written_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(server.url()) as (kept,):
            assert await kept.wishes() == {}
            with pytest.raises(StateUnavailable, match="this Redis is a copy that cannot be"):
                await kept.wish("core", LOADED)
            assert await kept.leads()

    with redis_server(tmp_path) as server:
        with server.client() as client:
            client.replicaof("127.0.0.1", str(free_ports(1)[0]))
        asyncio.run(scenario())


def test_what_no_gateway_wrote_to_redis_is_told_once_and_left_alone(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def by_hand(key: str, value: str, field: str = "") -> None:
        with server.client() as client:
            if field:
                client.hset(f"{prefix}{key}", field, value)
            else:
                client.set(f"{prefix}{key}", value)
            client.set(f"{prefix}change", f"by hand: {key}")

    async def scenario() -> None:
        async with opened(url) as (kept,):
            await kept.wish("core", LOADED)
            by_hand("wishes", "{", field="broken")
            for _ in range(3):
                with pytest.raises(StateUnavailable, match=f"no gateway wrote, at {prefix}"):
                    await kept.wishes()
            await kept.wish("broken", None)
            assert list(await kept.wishes()) == ["core"]
            by_hand(f"operation:{ID}", "{")
            with pytest.raises(StateUnavailable, match=f"no gateway wrote, at {prefix}"):
                await kept.operation(ID)
            by_hand("wishes", "a text")
            with pytest.raises(StateUnavailable, match=r"Redis refuses a command \(WRONGTYPE\)"):
                await kept.wishes()

    url = server.url()
    prefix = url.partition("prefix=")[2]
    asyncio.run(scenario())
    told = [record.getMessage() for record in caplog.records if "no gateway" in record.message]
    assert len(told) == 2


def test_operations_and_the_lead_lapse_in_redis(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(url) as (kept,):
            assert await kept.leads()
            await kept.wish("core", LOADED)
            await kept.record(ID, {})

    async def look() -> None:
        with server.client() as client:
            left = {key.decode(): client.ttl(key) for key in client.scan_iter(f"{prefix}*")}
        assert 3590 < left.pop(f"{prefix}operation:{ID}") <= 3600
        assert left == dict.fromkeys((f"{prefix}{n}" for n in ("wishes", "revision", "change")), -1)

    url = server.url()
    prefix = url.partition("prefix=")[2]
    asyncio.run(scenario())
    asyncio.run(look())


def test_gateways_with_other_prefixes_do_not_meet(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(server.url()) as (one,), opened(server.url()) as (other,):
            await one.wish("core", LOADED)
            assert await other.wishes() == {}
            assert await one.leads()
            assert await other.leads()

    asyncio.run(scenario())


def test_without_the_extra_it_is_told_what_to_install(tmp_path: Path) -> None:
    """In an environment that is this one, less redis."""
    installed = Path(redis.__file__).parents[1]
    for path in installed.iterdir():
        if path.name != "redis":
            (tmp_path / path.name).symlink_to(path)
    code = (
        "from gateway.state.store import *\n"
        "store('memory:')\n"
        "try: store('redis://host')\n"
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
        "GATEWAY_STATE is in Redis, which needs: pip install 'triton-gateway[redis]'\n"
    ), ended.stderr
