"""The Redis of compose.yaml and of k8s/ asks for its password, which no list of processes shows."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml

from gateway.errors import StateUnavailable
from gateway.repository.state.content import ALL, MODELS, DesiredModel
from gateway.repository.state.places import open_state_store
from tests.support.manifests import Manifests
from tests.support.missing import find_program
from tests.support.servers import ROOT, free_ports
from tests.support.wait import wait_until

PASSWORD = "f00d" * 16
VARIABLE = "REDISCLI_AUTH"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def compose_command() -> list[str]:
    """Return the command as Compose passes it to the container, where $$ is $."""
    return [word.replace("$$", "$") for word in COMPOSE["redis"]["command"]]


def kubernetes_command() -> list[str]:
    (container,) = Manifests.of("prod").pod("redis")["containers"]
    (variable,) = container["env"]
    assert variable["name"] == VARIABLE
    words: list[str] = container["args"]
    return words


COMMANDS = {"compose.yaml": compose_command, "k8s": kubernetes_command}


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The same command on a port and in a folder of the test's."""
    (port,) = free_ports(1)
    find_program("redis-server")
    more = f"redis-server - --port {port} --bind 127.0.0.1 --dir {folder}"
    words = [word.replace("redis-server -", more, 1) for word in command]
    assert words != command
    environment = {"PATH": "/usr/bin:/bin", VARIABLE: PASSWORD}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as running:
        try:
            wait_until(lambda: listens(port))
            yield running, port
        finally:
            running.kill()


def listens(port: int) -> bool:
    with suppress(redis.exceptions.ConnectionError), redis.Redis(port=port) as client:
        with suppress(redis.exceptions.AuthenticationError):
            client.ping()
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_redis_requires_the_password_and_does_not_show_it(name: str, tmp_path: Path) -> None:
    with started(COMMANDS[name](), tmp_path) as (running, port):
        with redis.Redis(port=port) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
            nobody.hset("triton-gateway:models", "m", "{}")
        with redis.Redis(port=port, password=PASSWORD) as client:
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
            assert client.config_get("save") == {"save": ""}
        process = psutil.Process(running.pid)
        assert process.name() == "redis-server"  # which gets the signals then
        assert not process.children()
        assert PASSWORD not in " ".join(process.cmdline())
        asyncio.run(kept(port))
        process.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0


async def kept(port: int) -> None:
    """Assert that the gateway keeps its state there with the password, and not without."""
    good = open_state_store(f"redis://:{PASSWORD}@127.0.0.1:{port}/0")
    await good.set_desired_model("m", DesiredModel(ALL))
    assert (await good.read(MODELS))["m"].is_loaded
    await good.close()
    separate = open_state_store(f"redis://127.0.0.1:{port}/0", PASSWORD)
    assert (await separate.read(MODELS))["m"].is_loaded
    await separate.close()
    for address in (f":wrong@127.0.0.1:{port}", f"127.0.0.1:{port}"):
        bad = open_state_store(f"redis://{address}/0")
        with pytest.raises(StateUnavailable):
            await bad.set_desired_model("m", DesiredModel(0))
        await bad.close()


def test_compose_requires_a_password() -> None:
    wanted = re.compile(r"\$\{REDIS_PASSWORD:\?[^}]*\.env[^}]*docs/operate/deploy\.md[^}]*\}")
    state = COMPOSE["gateway"]["environment"]["GATEWAY_STATE"]
    assert wanted.sub("P", state) == "redis://:P@redis:6379/0"
    assert wanted.fullmatch(COMPOSE["redis"]["environment"][VARIABLE])


def test_pods_read_the_same_secret() -> None:
    made = Manifests.of("prod")
    (gateway,) = made.pod("triton-gateway")["containers"]
    (server,) = made.pod("redis")["containers"]
    given = {variable["name"]: variable["value"] for variable in gateway["env"]}
    assert given["GATEWAY_STATE"] == "redis://redis:6379/0"
    file = Path(given["GATEWAY_STATE_PASSWORD_FILE"])
    (volume,) = (
        mount["name"] for mount in gateway["volumeMounts"] if mount["mountPath"] == str(file.parent)
    )
    (secret,) = (
        each["secret"]["secretName"]
        for each in made.pod("triton-gateway")["volumes"]
        if each["name"] == volume
    )
    assert server["env"][0]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": file.name}
