"""A Triton whose management only its gateway may call: the embedded one, or one with a configured secret."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.config.settings import Settings, read_settings
from gateway.messages import CommandError
from gateway.triton.restricted_api import read_restricted_api
from tests.support.fleet import BODY, V2_BODY, write_echo
from tests.support.servers import free_ports, gateway
from tests.support.up import Up
from tests.support.wait import wait_until

SECRET_SETTING = "team-secret=0123456789abcdef-own"
CODE = base64.b64encode(b"raise RuntimeError('code of a web page')").decode()
# What a page of another origin can send without being asked anything before: a plain POST.
PLAIN = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
UPLOAD = f'{{"parameters": {{"config": "{{}}", "file:1/model.py": "{CODE}"}}}}'
RESTRICTED = [
    ("POST", "/v2/repository/models/echo/load", UPLOAD),
    ("POST", "/v2/repository/models/echo/unload", ""),
    ("POST", "/v2/repository/index", ""),
    ("POST", "/v2/logging", '{"log_file": "/tmp/written-by-a-page"}'),
    ("GET", "/v2/trace/setting", ""),
    ("GET", "/v2/models/echo/trace/setting", ""),
    ("GET", "/v2/systemsharedmemory/status", ""),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("echo", "other"):
        write_echo(folder, name)
    return folder


@pytest.fixture(scope="module")
def up(repository: Path) -> Iterator[Up]:
    running = Up(repository, "--log-verbose", "1", replicas=2)
    with running:
        running.wait_for("ready after")
        yield running


def secret_of(server: psutil.Process) -> str:
    """The value that Triton's arguments restrict its APIs with."""
    flag = "--http-restricted-api="
    (value,) = (word for word in server.cmdline() if word.startswith(flag))
    assert value.startswith(f"{flag}model-repository,shared-memory,logging,trace:")
    return value.rpartition("=")[2]


def grpc_port(server: psutil.Process) -> int:
    flag = "--grpc-port="
    return next(int(word.removeprefix(flag)) for word in server.cmdline() if word.startswith(flag))


def restricted_statuses(triton: str) -> list[int]:
    """Return the statuses of the requests that only a gateway may send."""
    responses = (
        httpx.request(method, f"http://{triton}{path}", content=body, headers=PLAIN)
        for method, path, body in RESTRICTED
    )
    return [response.status_code for response in responses]


def assert_manages(url: str) -> None:
    """Assert that the gateway's own management works, and the administrator's view of Triton's settings."""
    for verb in ("unload", "load"):
        answer = httpx.post(f"{url}/v2/repository/models/other/{verb}", timeout=60)
        assert answer.status_code == 200, answer.text
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/models/echo/trace/setting"):
        answer = httpx.get(f"{url}{path}", headers={"triton-gateway-secret": "mine"})
        assert answer.status_code == 200, answer.text
    assert httpx.post(f"{url}/v1/models/echo/infer", json=BODY).status_code == 200


@pytest.mark.fault("a web page asks the embedded Triton directly to load code")
def test_management_of_the_embedded_triton_is_403_except_for_the_gateway(up: Up) -> None:
    for triton in up.tritons:
        assert restricted_statuses(triton) == [403] * len(RESTRICTED)
        direct = httpx.post(f"http://{triton}/v2/models/echo/infer", json=V2_BODY)
        assert direct.status_code == 200
    assert_manages(up.url)


@pytest.mark.long
@pytest.mark.fault("a web page asks the embedded Triton directly to load code")
def test_management_over_grpc_is_restricted(up: Up) -> None:
    async def collect_errors(port: int) -> list[str]:
        errors = []
        async with InferenceServerClient(f"127.0.0.1:{port}") as triton:
            assert await triton.is_server_live()
            for call in (
                triton.load_model("echo"),
                triton.get_model_repository_index(),
                triton.get_log_settings(),
                triton.get_trace_settings(),
                triton.get_system_shared_memory_status(),
            ):
                with pytest.raises(InferenceServerException) as refused:
                    await call
                errors.append(str(refused.value.message()))
        return errors

    for server in up.servers():
        for error in asyncio.run(collect_errors(grpc_port(server))):
            assert "restricted" in error


def test_secret_is_in_no_output_and_no_command_line_of_the_gateway(up: Up) -> None:
    servers = up.servers()
    secrets = {secret_of(server) for server in servers}
    assert len(secrets) == 1
    (secret,) = secrets
    assert len(secret) >= 43  # 256 bits
    for process in up.family():
        if process not in servers:
            assert secret not in " ".join(process.cmdline())
    for path in ("/metrics", "/v1/replicas", "/readyz", "/v1/models", "/openapi.json"):
        assert secret not in httpx.get(f"{up.url}{path}").text
    assert secret not in up.output


@pytest.mark.long
@pytest.mark.fault("a web page asks the embedded Triton directly to load code")
def test_restarted_triton_is_restricted_again(up: Up) -> None:
    up.servers()[0].kill()
    up.wait_for("Triton is ready again")
    wait_until(lambda: httpx.get(f"{up.url}/v1/replicas").text.count('"UP"') == 2)
    assert restricted_statuses(up.tritons[0]) == [403] * len(RESTRICTED)
    assert_manages(up.url)


@dataclass
class StandaloneTriton:
    """`triton-gateway triton`, with a configured secret."""

    up: Up

    def url(self, **other: int) -> str:
        ports = {"http": 0, "grpc": 0, "metrics": 0}
        for word in self.up.server().cmdline():
            for name in ports:
                if word.startswith(f"--{name}-port="):
                    ports[name] = int(word.rpartition("=")[2])
        ports |= other
        return f"http://127.0.0.1:{ports['http']}?grpc={ports['grpc']}&metrics={ports['metrics']}"


@pytest.fixture(scope="module")
def standalone(repository: Path) -> Iterator[StandaloneTriton]:
    environment = {"GATEWAY_TRITON_RESTRICTED_API": SECRET_SETTING}
    running = Up(repository, command="triton", environment=environment)
    with running:
        running.wait_for("Triton is ready")
        assert "load code into Triton" not in running.output
        yield StandaloneTriton(running)


@pytest.mark.long
def test_gateway_with_the_configured_secret_manages_its_triton(
    standalone: StandaloneTriton,
) -> None:
    assert restricted_statuses(standalone.up.triton) == [403] * len(RESTRICTED)
    settings = {"triton_restricted_api": SECRET_SETTING, "log_level": "debug"}
    with gateway(standalone.url(), **settings) as (client, command):
        assert_manages(str(client.base_url))
    secret = SECRET_SETTING.partition("=")[2]
    assert secret not in command.output + standalone.up.output


@pytest.mark.long
def test_secret_is_sent_over_http_if_grpc_is_unreachable(standalone: StandaloneTriton) -> None:
    (nobody,) = free_ports(1)
    url = standalone.url(grpc=nobody)
    with gateway(url, triton_restricted_api=SECRET_SETTING) as (client, command):
        assert client.post("/v2/repository/models/other/load").status_code == 200
        command.wait_for("managing models over HTTP")


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [{}, {"triton_restricted_api": "team-secret=another-secret-0"}]
)
def test_gateway_without_the_secret_names_the_missing_setting(
    standalone: StandaloneTriton, settings: dict[str, str]
) -> None:
    with gateway(standalone.url(), **settings) as (client, command):
        advice = "check GATEWAY_TRITON_RESTRICTED_API"
        wait_until(lambda: advice in client.get("/readyz").text)
        assert "another-secret" not in command.output


def test_triton_command_names_the_setting_that_restricts_it(repository: Path) -> None:
    with Up(repository, command="triton") as triton:
        triton.wait_for("Triton is ready")
    line = triton.wait_for("load code into Triton")
    assert "GATEWAY_TRITON_RESTRICTED_API=KEY=SECRET" in line


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--http-restricted-api", "--grpc-restricted-protocol"])
def test_restricted_api_flag_of_triton_is_refused(repository: Path, flag: str) -> None:
    with Up(repository, "--triton-arg", f"{flag}=inference:a=b") as up:
        assert up.end() == 1
    assert "GATEWAY_TRITON_RESTRICTED_API" in up.lines[-1]


@pytest.mark.parametrize(
    "value",
    [
        "secretsecretsecret",
        "Key=secretsecretsecret",
        "key=secret",
        "key=secret secret secret",
        "=x",
    ],
)
def test_invalid_secret_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GATEWAY_TRITON_RESTRICTED_API", value)
    with pytest.raises(CommandError) as refused:
        read_settings()
    sentence = str(refused.value)
    assert sentence.startswith("GATEWAY_TRITON_RESTRICTED_API is invalid: expected KEY=SECRET")
    assert value not in sentence


def test_settings_and_the_parsed_value_do_not_show_the_secret() -> None:
    values: dict[str, Any] = {"triton_restricted_api": SECRET_SETTING}
    settings = Settings(**values)
    assert "0123456789" not in f"{settings!r} {settings} {settings.model_dump()}"
    parsed = read_restricted_api(settings)
    assert parsed is not None
    assert "0123456789" not in repr(parsed)
    assert dict(parsed.metadata) == {"triton-grpc-protocol-team-secret": "0123456789abcdef-own"}
