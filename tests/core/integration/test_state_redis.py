"""The state in a Redis that is unreachable, slow, hostile, or protected. `test_state.py` has its contract."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import struct
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trustme
import uvloop

from gateway.errors import StateUnavailable
from gateway.repository.models_file import ModelsFile
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import CONFIRMED, CORDONS, MODELS, DesiredModel
from gateway.repository.state.store import StateStore
from tests.support.keys import INFER, bearer, entry, written
from tests.support.redis_server import RedisServer
from tests.support.servers import free_ports, gateway
from tests.support.state import ID, LABELS, LOADED, UNLOADED, is_leader, opened
from tests.support.wait import TIMEOUT_S


@pytest.fixture(scope="module", name="server")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    return uvloop.run


@pytest.mark.fault("Redis goes away and comes back")
def test_redis_that_is_unreachable_is_an_error_until_it_is_back(
    tmp_path: Path,
    run: Callable[[Coroutine[Any, Any, None]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def assert_unreachable(store: StateStore) -> None:
        for question in (store.read(MODELS), store.read_operation(ID)):
            with pytest.raises(StateUnavailable, match="read: Redis is unreachable"):
                await question
        for change in (store.set_desired_model("core", LOADED), store.record_operation(ID, {})):
            with pytest.raises(StateUnavailable, match="written: Redis is unreachable"):
                await change
        assert await is_leader(store)

    async def assert_reachable(store: StateStore, loaded: bool) -> None:
        server.start()
        await store.read(MODELS)
        await store.set_desired_model("core", DesiredModel(int(loaded)))
        assert (await store.read(MODELS))["core"].is_loaded == loaded
        assert await is_leader(store)

    async def scenario() -> None:
        async with opened(server.url(), 2) as stores:
            for loaded in (True, False, True):
                for store in stores:
                    await assert_unreachable(store)
                await assert_reachable(stores[0], loaded)
                assert (await stores[1].read(MODELS))["core"].is_loaded == loaded
                assert not await is_leader(stores[1])
                server.kill()

    caplog.set_level(logging.INFO)
    with RedisServer(tmp_path) as server:
        server.kill()
        run(scenario())
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("gateway.repository.state.")
    ]
    place = f"the state at redis://127.0.0.1:{server.port}/0"
    # Each of the two stores loses it three times, and logs that once each time, not for each call.
    assert logged.count(f"{place} cannot be read: Redis is unreachable") == 6
    assert logged.count(f"{place} can be read again") == 6


@pytest.mark.fault("Redis goes away and comes back")
def test_redis_that_hangs_is_an_error_after_the_timeout(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def scenario() -> None:
        async with opened(server.url(), 2) as (used, new):
            await used.set_desired_model("core", LOADED)
            server.signal(signal.SIGSTOP)
            for answers in await asyncio.gather(ask(used), ask(new)):  # while it hangs
                assert [type(answer) for answer in answers] == [StateUnavailable] * 3 + [bool]
                assert "no response from Redis" in str(answers[0])
            server.signal(signal.SIGCONT)
            await used.set_desired_model("core", LOADED)
            assert (await new.read(MODELS))["core"].is_loaded

    async def ask(store: StateStore) -> list[Any]:
        questions = (
            store.read(MODELS),
            store.set_desired_model("core", UNLOADED),
            store.read_operation(ID),
        )
        return [*await asyncio.gather(*questions, is_leader(store), return_exceptions=True)]

    with RedisServer(tmp_path) as server:
        run(scenario())


def test_load_that_ends_while_redis_is_not_writable_is_unknown_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(server.url(), 2) as (store, other):
            state = SharedState(store, ModelsFile(None), can_upload=False)
            await state.confirm("a:8000", "core", "6")
            with server.client() as client:
                client.replicaof("127.0.0.1", str(free_ports(1)[0]))  # not writable
                for generation in ("", "7"):
                    await state.confirm("a:8000", "core", generation)
                await state.refresh()
                assert state.confirmed == {"a:8000": {"core": "7"}}
                assert await other.read(CONFIRMED) == {"a:8000": {"core": "6"}}
                client.replicaof("NO", "ONE")
            for _ in range(2):
                await state.refresh()
                assert state.confirmed == await other.read(CONFIRMED) == {}

    with RedisServer(tmp_path) as server:
        asyncio.run(scenario())


def test_close_of_the_store_does_not_wait_for_a_redis_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        url = server.url()
        async with opened(url) as (leader,):
            assert await is_leader(leader)
            async with opened(url) as (other,):
                assert not await is_leader(other)
                server.signal(signal.SIGSTOP)  # until both have closed
        server.signal(signal.SIGCONT)
        # Each asked whether it leads; the leader does not wait longer to give the lease back.
        assert scripts() == 2

    def scripts() -> int:
        with server.client() as client:
            calls: int = client.info("commandstats")["cmdstat_eval"]["calls"]
        return calls

    with RedisServer(tmp_path) as server:
        asyncio.run(scenario())


@asynccontextmanager
async def other_server(answer: bytes, *rest: bytes, pause_s: float = 0) -> AsyncIterator[str]:
    """Yield the address of a server that is not Redis: it answers a line, and sends the rest slowly."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await reader.readline()
            writer.write(answer)
            for piece in rest:
                await asyncio.sleep(pause_s)
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # the client has closed the connection, or the test is over
        finally:
            writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks))


@pytest.mark.long
async def test_slow_responses_of_redis_share_one_timeout() -> None:
    """The timeout is 3 s for the whole response, not for each of its pieces, which take 160 s."""
    late = other_server(b"", *[b"+OK\r\n"] * 200, pause_s=0.8)
    async with late as url, opened(f"{url}/1".replace("//", "//:password@")) as (store,):
        with pytest.raises(StateUnavailable, match="no response from Redis"):
            await asyncio.wait_for(store.read(MODELS), TIMEOUT_S)


async def test_server_that_is_not_redis_is_reported() -> None:
    async with other_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, opened(url) as (store,):
        with pytest.raises(StateUnavailable, match="the server is not Redis"):
            await store.read(MODELS)
        assert await is_leader(store)


@contextmanager
def resetting_server() -> Iterator[str]:
    """A server that resets each connection after its first response."""

    def serve() -> None:
        with suppress(OSError):  # until the listener is shut down
            while True:
                with listener.accept()[0] as connection:
                    connection.recv(1000)
                    connection.send(b"+OK\r\n")
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://:password@127.0.0.1:{listener.getsockname()[1]}/1"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_connection_that_is_reset_during_its_setup_is_an_outage() -> None:
    with resetting_server() as url:
        async with opened(url) as (store,):
            for _ in range(20):
                with pytest.raises(StateUnavailable, match="Redis is unreachable"):
                    await store.read(MODELS)


async def test_connections_that_redis_closed_are_opened_again(server: RedisServer) -> None:
    async with opened(server.url()) as (store,):
        await asyncio.gather(*(store.read(MODELS) for _ in range(5)))
        with server.client() as client:
            assert client.client_kill_filter(_type="normal", skipme=True) >= 5
        for _ in range(6):
            await store.read(MODELS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--requirepass", "another one"], "Redis rejects this user or password"),
        # It quotes the arguments of a command that it does not know.
        (["--rename-command", "AUTH", ""], "Redis rejected a command"),
    ],
)
def test_password_of_redis_is_in_no_error_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: list[str], reason: str
) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as (store,):
            with pytest.raises(StateUnavailable) as refused:
                await store.read(MODELS)
            assert refused.value.detail.endswith(f"cannot be read: {reason}")
            assert "hunter2" not in "".join(traceback.format_exception(refused.value))

    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, *options) as server:
        for user in ("", "me"):
            asyncio.run(scenario(server.url().replace("//", f"//{user}:hunter2%23@")))
    assert f"127.0.0.1:{server.port}/0 cannot be read: {reason}" in caplog.text
    assert "hunter2" not in caplog.text


def test_password_of_redis_may_contain_any_character(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as (store,):
            await store.set_desired_model("core", LOADED)
            assert "core" in await store.read(MODELS)

    with RedisServer(tmp_path, "--requirepass", "#/?@:%ü") as server:
        asyncio.run(scenario(server.url().replace("//", f"//:{quote('#/?@:%ü', safe='')}@")))


def test_certificate_of_redis_is_verified(tmp_path: Path) -> None:
    async def scenario(authority: Path, reason: str) -> None:
        url = server.url(ssl_ca_certs=str(authority)).replace("redis://", "rediss://")
        async with opened(url) as (store,):
            if reason:
                with pytest.raises(StateUnavailable, match=reason):
                    await store.set_desired_model("core", LOADED)
            else:
                await store.set_desired_model("core", LOADED)
                assert "core" in await store.read(MODELS)

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
    with RedisServer(tmp_path, *options) as server:
        asyncio.run(scenario(tmp_path / "ours.pem", ""))
        asyncio.run(scenario(tmp_path / "theirs.pem", "Redis is unreachable"))


def test_read_only_replica_of_redis_is_read_and_writes_are_errors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(server.url()) as (store,):
            assert await store.read(MODELS) == {}
            with pytest.raises(StateUnavailable, match="this Redis is a read-only replica"):
                await store.set_desired_model("core", LOADED)
            assert await is_leader(store)

    with RedisServer(tmp_path) as server:
        with server.client() as client:
            client.replicaof("127.0.0.1", str(free_ports(1)[0]))
        asyncio.run(scenario())


@pytest.mark.fault(
    "somebody writes anything else into the state: other types, structures, names, sizes"
)
def test_rate_is_counted_with_any_data_in_redis(server: RedisServer, tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer", requests_per_second=1)])
    url = server.url()
    prefix = url.partition("prefix=")[2]
    (nobody,) = free_ports(1)
    with (
        server.client() as redis_client,
        gateway(f"http://127.0.0.1:{nobody}", state=url, keys_file=str(keys)) as (client, _),
    ):
        call = partial(client.get, "/v2", headers=bearer(INFER))
        call()
        (key,) = redis_client.scan_iter(f"{prefix}rate*")
        values = ("abc", "-5", "1e30", "9" * 40, "", "nan", b"\xff")
        for name, value in product(("start", "current", "previous"), values):
            redis_client.delete(key)
            redis_client.hset(key, name, value)
            statuses = {call().status_code for _ in range(2)}
            assert statuses <= {404, 429, 503}, (name, value)
        redis_client.set(key, "abc")
        assert {call().status_code for _ in range(3)} <= {404, 429, 503}


def test_operations_expire_in_redis_and_the_desired_models_do_not(server: RedisServer) -> None:
    async def scenario() -> None:
        async with opened(url) as (store,):
            assert await is_leader(store)
            await store.set_desired_model("core", LOADED)
            await store.record_operation(ID, {"id": ID})

    def check_expirations() -> None:
        with server.client() as client:
            left = {key.decode(): client.ttl(key) for key in client.scan_iter(f"{prefix}*")}
        assert 3000 < left.pop(f"{prefix}operation:{ID}") <= 3600
        names = ("state:models", "state:revision", "state:changes")
        assert left == dict.fromkeys((f"{prefix}{name}" for name in names), -1)

    url = server.url()
    prefix = url.partition("prefix=")[2]
    asyncio.run(scenario())
    check_expirations()


async def test_gateways_with_different_prefixes_share_no_state(server: RedisServer) -> None:
    async with opened(server.url()) as (one,), opened(server.url()) as (other,):
        await one.set_desired_model("core", LOADED)
        assert await other.read(MODELS) == {}
        assert await is_leader(one)
        assert await is_leader(other)


@asynccontextmanager
async def delay_scripts(port: int, delay_s: float) -> AsyncIterator[int]:
    """Forward to a Redis; a script of a client arrives later, also if the client has gone meanwhile."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", port)
        answers = asyncio.create_task(forward(from_redis, writer, 0))
        try:
            await forward(reader, to_redis, delay_s)
        finally:
            answers.cancel()
            to_redis.close()
            writer.close()

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script_delay_s: float
    ) -> None:
        while data := await reader.read(1 << 16):
            if b"EVAL" in data:
                await asyncio.sleep(script_delay_s)
            writer.write(data)

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as proxy:
        yield proxy.sockets[0].getsockname()[1]


@pytest.mark.fault("Redis hangs, and executes later what it received meanwhile")
async def test_change_that_reaches_redis_after_its_timeout_is_not_applied(
    server: RedisServer,
) -> None:
    url = server.url()
    async with delay_scripts(server.port, 1.3) as port, opened(url) as (direct,):
        async with opened(url.replace(str(server.port), str(port), 1)) as (delayed,):
            changes = (
                delayed.set_desired_model("core", LOADED),
                delayed.write(LABELS, ("core", "stable"), {"version": "1"}),
                delayed.write(CORDONS, ("a:8000",), True),
                delayed.write(CONFIRMED, ("a:8000", "core"), "1"),
                delayed.acquire_lease("leader"),
            )
            results = await asyncio.gather(*changes, return_exceptions=True)
            assert all(isinstance(result, StateUnavailable) for result in results)
            await asyncio.sleep(1)
        assert await direct.read(MODELS) == {}
        assert await direct.read(LABELS) == {}
        assert await direct.read(CORDONS) == {}
        assert await direct.read(CONFIRMED) == {}
        assert await direct.acquire_lease("leader")
