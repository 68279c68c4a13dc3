"""A gateway without keys: only local programs administer, and only known hosts are served."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.fake_triton import Fake, fake_triton, port_of
from tests.support.keys import entry, written
from tests.support.missing import find_program
from tests.support.servers import Command, free_ports, gateway
from tests.support.wait import wait_until

LOAD = "/v2/repository/models/none/load"  # 404 for those who may: there is no such model
MAY, MAY_NOT = 404, 403
NOBODY_UID = 65534
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with fake_triton() as running:
        yield running


@contextmanager
def before(fake: Fake, **settings: str) -> Iterator[httpx.Client]:
    """A gateway as it is set up on a laptop, on 127.0.0.1."""
    settings = {"allowed_hosts": "", **settings}
    with gateway(f"http://127.0.0.1:{fake.port}", **settings) as (client, _):
        yield client


@pytest.fixture(scope="module")
def client(fake: Fake) -> Iterator[httpx.Client]:
    with before(fake, allowed_hosts="*") as running:
        yield running


@pytest.fixture(scope="module")
def closed(fake: Fake) -> Iterator[httpx.Client]:
    with before(fake) as running:
        yield running


def assert_refused(answer: httpx.Response, reason: str) -> None:
    assert answer.status_code == MAY_NOT, answer.text
    error = answer.json()
    assert error["code"] == "FORBIDDEN"
    assert reason in error["error"]


def test_local_program_or_own_page_may_administer(client: httpx.Client) -> None:
    headers: dict[str, str]
    for headers in (
        {},
        {"Host": "localhost"},
        {"Host": "LocalHost:8080"},
        {"Host": "app.localhost:8080", "Origin": "http://app.localhost:8080"},
        {"Host": "[::1]:8080"},
        {"Origin": str(client.base_url).rstrip("/")},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Authorization": "Bearer tgw_any"},
    ):
        assert client.post(LOAD, headers=headers).status_code == MAY, headers


PROXIES = [
    "Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server",
    "X-Original-Forwarded-For", "X-Original-Host", "X-Real-IP", "X-Envoy-External-Address",
    "X-Envoy-Expected-Rq-Timeout-Ms", "CF-Connecting-IP", "DO-Connecting-IP", "True-Client-IP",
    "X-Client-IP", "X-Cluster-Client-IP", "Fastly-Client-IP", "X-Azure-ClientIP", "X-Appengine-User-IP",
    "X-Amzn-Trace-Id", "X-Remote-Addr", "CDN-Loop",
]  # fmt: skip


FOREIGN: list[tuple[dict[str, str], str]] = [
    *(({header: "127.0.0.1"}, header.lower()) for header in PROXIES),
    ({"Origin": EVIL}, "another origin"),
    ({"Origin": "null"}, "another origin"),
    ({"Origin": "http://[::1"}, "another origin"),
    ({"Origin": "http://localhost.evil.example"}, "another origin"),
    ({"Origin": "http://localhost:1"}, "another origin"),
    ({"Origin": "http://127.0.0.1"}, "another origin"),
    ({"Sec-Fetch-Site": "cross-site"}, "another origin"),
    ({"Sec-Fetch-Site": "same-site"}, "another origin"),
    ({"Host": "evil.example", "Origin": "http://evil.example"}, "its host is 'evil.example'"),
    ({"Host": "models.example.com"}, "its host is 'models.example.com'"),
    ({"Host": "127.0.0.1.nip.io"}, "its host is '127.0.0.1.nip.io'"),
]


@pytest.mark.fault(
    "a proxy on the gateway's machine forwards administrative calls, whether it names"
)
def test_request_of_a_proxy_or_another_origin_may_not_administer(
    client: httpx.Client, subtests: pytest.Subtests
) -> None:
    for headers, reason in FOREIGN:
        with subtests.test(str(headers)):
            assert_refused(client.post(LOAD, headers=headers), reason)


def test_administration_can_be_disabled(fake: Fake) -> None:
    with before(fake, local_admin="false") as client:
        assert_refused(client.post(LOAD), "GATEWAY_LOCAL_ADMIN is false")
        assert client.get("/v1/models").status_code == 200


# Real proxies and users.

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
{user}
events {{ worker_connections 64; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{gateway}; {more} }}
    }}
}}
"""
HTTP_1_1 = 'proxy_http_version 1.1; proxy_set_header Connection "";'
PASSED_HOST = f"{HTTP_1_1} proxy_set_header Host $http_host;"


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def nginx(gateway_port: int, more: str, user: str = "") -> Iterator[httpx.Client]:
    binary = find_program("nginx")
    (port,) = free_ports(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(folder) / "nginx.conf"
        config.write_text(
            NGINX.format(folder=folder, port=port, gateway=gateway_port, more=more, user=user)
        )
        command = [binary, "-p", folder, "-c", str(config)]
        running = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(running.terminate)
        wait_until(lambda: connects(port))
        yield stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))


@pytest.mark.fault(
    "a proxy on the gateway's machine forwards administrative calls, whether it names"
)
def test_plain_proxy_of_nginx_may_infer_and_not_administer(client: httpx.Client) -> None:
    """The client's address is that of nginx then, the host is the gateway's, and no header shows it."""
    with nginx(port_of(client), "") as outside:
        assert_refused(outside.post(LOAD), "HTTP/1.0")
        assert outside.get("/v1/models").status_code == 200


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="to become another user takes root")


@pytest.mark.fault(
    "a proxy on the gateway's machine forwards administrative calls, whether it names"
)
@as_root
@pytest.mark.parametrize("more", [HTTP_1_1, PASSED_HOST], ids=["its host", "the client's host"])
def test_proxy_of_another_user_may_not_administer(client: httpx.Client, more: str) -> None:
    with nginx(port_of(client), more, "user nobody nogroup;") as outside:
        for host in ("localhost", "127.0.0.1:8080"):
            refused = outside.post(LOAD, headers={"Host": host})
            assert_refused(refused, "a program of another user")
        assert outside.get("/v1/models").status_code == 200


@pytest.mark.fault(
    "a proxy on the gateway's machine forwards administrative calls, whether it names"
)
@as_root
def test_another_user_of_the_machine_may_not_administer(client: httpx.Client) -> None:
    curl = find_program("curl")
    command = [curl, "-sS", "-X", "POST", f"{str(client.base_url).rstrip('/')}{LOAD}"]
    codes = {}
    for user in (0, NOBODY_UID):
        curl_run = subprocess.run(command, user=user, cwd="/", capture_output=True, check=True)
        codes[user] = json.loads(curl_run.stdout)["code"]
    assert codes == {0: "MODEL_NOT_FOUND", NOBODY_UID: "FORBIDDEN"}


# DNS rebinding: a page of evil.example, whose name has come to stand for 127.0.0.1.

REQUESTS = [
    ("GET", "/"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/readyz"), ("GET", "/v2"),
    ("POST", "/v1/models/m/infer"), ("POST", "/v2/models/m/infer"), ("GET", "/v1/replicas"), ("POST", LOAD),
]  # fmt: skip
REBOUND = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}


@pytest.mark.fault("a web page resolves its own name to 127.0.0.1 (DNS rebinding)")
def test_request_for_another_host_is_403_on_every_route(closed: httpx.Client) -> None:
    for method, path in REQUESTS:
        assert_refused(
            closed.request(method, path, headers=REBOUND),
            "host 'evil.example' is not allowed; if it is a name of this gateway, add it to",
        )
        assert closed.request(method, path).status_code != MAY_NOT
        assert closed.request(method, path, headers={"Host": "localhost"}).status_code != MAY_NOT


def test_hosts_in_the_setting_are_allowed(fake: Fake) -> None:
    with before(fake, allowed_hosts="models.example.com,*.test") as client:
        for host, status in (
            ("models.example.com", 200),
            ("a.test:8080", 200),
            ("localhost", 200),
            ("evil.example", 403),
        ):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host


@pytest.mark.long
@pytest.mark.fault("a web page resolves its own name to 127.0.0.1 (DNS rebinding)")
def test_every_worker_refuses_another_host(fake: Fake) -> None:
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": f"http://127.0.0.1:{fake.port}",
        "GATEWAY_ALLOWED_HOSTS": "",
    }
    with Command(
        "serve", "--port", str(port), "--workers", "2", environment=environment
    ) as command:
        command.wait_for("serving")
        for _ in range(8):  # each on a connection of its own
            for host, status in (("evil.example", 403), ("localhost", 200)):
                url = f"http://127.0.0.1:{port}/v1/models"
                assert httpx.get(url, headers={"Host": host}, timeout=30).status_code == status


@pytest.mark.parametrize("keys", [False, True], ids=["on every address", "with keys"])
def test_any_host_is_allowed_on_every_address_or_with_keys(
    fake: Fake, keys: bool, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": f"http://127.0.0.1:{fake.port}",
        "GATEWAY_ALLOWED_HOSTS": "",
    }
    if keys:
        path = written(tmp_path / "keys.yaml", [entry("tgw_a-secret", "infer")])
        environment["GATEWAY_KEYS_FILE"] = str(path)
    host = "127.0.0.1" if keys else "0.0.0.0"
    with Command("serve", "--host", host, "--port", str(port), environment=environment) as command:
        command.wait_for("serving")
        headers = {"Host": "models.example.com", "X-API-Key": "tgw_a-secret"}
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)
        assert answer.status_code == 200
        assert_refused(httpx.post(f"http://127.0.0.1:{port}{LOAD}", headers=headers), "")
