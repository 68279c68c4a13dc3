"""`triton-gateway up` as a process: one command, clear messages, and no process left when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from gateway.embedded.options import CannotStart, TritonOptions
from gateway.embedded.supervisor import MAX_RESTARTS
from tests.support import network
from tests.support.servers import ROOT, Command, free_ports
from tests.support.up import Up, holding, nothing_left, wait_for_end, write_model
from tests.support.wait import TIMEOUT_S, wait_until


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one small model."""
    write_model(tmp_path)
    return tmp_path


def lives(triton: str) -> bool:
    """Return whether the Triton at this address serves its model."""
    url = f"http://{triton}/v2/models/echo/ready"
    return httpx.get(url, timeout=TIMEOUT_S).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_leaves_no_process_after_any_signal(repository: Path, number: signal.Signals) -> None:
    # Without the tests' own guard, which would clean up in its place.
    with Up(repository, guarded=False) as up:
        up.wait_for("ready after")
        assert up.infer().json()["outputs"] == {"OUT": [1.5, 2.5]}
        with nothing_left(up, brief=number is signal.SIGTERM):
            os.kill(up.pid, number)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_up_ends_at_a_signal_while_triton_is_starting(
    repository: Path, number: signal.Signals
) -> None:
    write_model(repository, "time.sleep(600)")
    # Without the tests' own guard, which would clean up in its place.
    with Up(repository, guarded=False) as up:
        wait_until(up.stubs)
        with nothing_left(up):
            os.kill(up.pid, number)
        assert number is signal.SIGKILL or up.end() == 130


@pytest.mark.long
def test_second_interrupt_ends_up_at_once(repository: Path) -> None:
    with Up(repository) as up:
        up.wait_for("ready after")
        port = httpx.URL(up.url).port or 0
        with nothing_left(up), socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(
                b"POST /v1/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            )
            os.kill(up.pid, signal.SIGINT)
            up.wait_for("press Ctrl-C again")
            os.kill(up.pid, signal.SIGINT)
            assert up.end() == 130
        assert "Traceback" not in up.output


@pytest.mark.fault("the only Triton is killed under load")
def test_killed_triton_is_503_at_once_and_is_restarted(repository: Path, tmp_path: Path) -> None:
    with Up(repository) as up:
        up.wait_for("ready after")
        hold = tmp_path / "hold"
        write_model(repository, holding(hold))
        up.server().kill()
        up.wait_for("restarting it")
        wait_until(lambda: up.get("/readyz").status_code == 503)
        assert up.triton in up.get("/readyz").text
        refused = up.infer()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert up.get("/livez").status_code == 200
        hold.unlink()
        up.wait_for("Triton is ready again")
        assert_serves_again(up)
        assert up.get("/readyz").status_code == 200


def assert_serves_again(up: Up) -> None:
    """Wait until it serves, and is 503 before: the gateway probes a lost Triton a few times a second."""

    def serves() -> bool:
        status = up.infer().status_code
        assert status in {200, 503}
        return status == 200

    wait_until(serves)


def test_killed_guard_is_replaced(repository: Path) -> None:
    with Up(repository) as up:
        up.wait_for("ready after")
        guard = up.server().parent()
        assert guard is not None
        before = [guard, *guard.children(recursive=True)]
        guard.kill()
        up.wait_for("Triton is ready again")
        wait_for_end(before)
        assert_serves_again(up)


def test_triton_that_ends_again_and_again_ends_the_command(repository: Path) -> None:
    with Up(repository, command="triton") as triton:
        triton.wait_for("Triton is ready")
        servers = [triton.server()]
        while len(servers) <= MAX_RESTARTS:
            servers[-1].kill()
            wait_until(lambda: triton.output.count("Triton is ready again") == len(servers))
            servers.append(triton.server())
        servers[-1].kill()
        assert triton.end() == 1
        assert "it exited 4 times within 60 s" in triton.lines[-1]


def test_triton_that_cannot_be_restarted_ends_up_with_the_reason(repository: Path) -> None:
    with Up(repository) as up:
        up.wait_for("ready after")
        write_model(repository, "raise ValueError('the weights are gone')")
        up.server().kill()
        assert up.end() == 1
        assert "Triton cannot be restarted" in up.lines[-1]
        assert "the weights are gone" in up.lines[-1]


# What a model does when it is loaded, the flags, and the last line of a command that cannot start.
REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("raise ValueError('no weights here')", (), "Triton could not load echo: no weights here$"),
    ("time.sleep(600)", ("--start-timeout", "1"),
     r"Triton was not ready within 1 s \(--start-timeout\); last line of its log: "),
    ("pass", ("--load", "nobody"), "nobody"),
    ("pass", ("--model-repository", "nowhere"),
     "model repository not found: nowhere; choose another with --model-repository$"),
    ("pass", ("--port", "9999", "--triton-grpc-port", "9999"),
     "--port and --triton-grpc-port both use port 9999; choose different ports$"),
    ("pass", ("--replicas", "2", "--port", "9080", "--triton-http-port", "8980"),
     r"--port and --triton-http-port \(\+ 100\) both use port 9080; choose different ports$"),
    ("pass", ("--replicas", "2", "--triton-http-port", "9000", "--triton-metrics-port", "9100"),
     r"--triton-metrics-port and --triton-http-port \(\+ 100\) both use port 9100; choose different ports$"),
    ("pass", ("--replicas", "2", "--triton-grpc-port", "65500"),
     r"--triton-grpc-port \(\+ 100\) must be between 1 and 65535, not 65600$"),
    ("pass", ("--triton-arg", "--grpc-address=0.0.0.0"),
     "--triton-arg does not accept --grpc-address=0.0.0.0: the embedded Triton listens on 127.0.0.1$"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_command_that_cannot_start_ends_with_the_reason(repository: Path, number: int) -> None:
    initialize, flags, words = REFUSED[number]
    write_model(repository, initialize)
    with Up(repository, *flags) as up:
        assert up.end() == 1
    assert re.search(f"^triton-gateway: .*{words}", up.lines[-1])


@pytest.mark.parametrize(
    "flag", ["--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port"]
)
def test_port_in_use_is_named_with_its_flag(repository: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with Up(repository, flag, str(port)) as up:
            assert up.end() == 1
    assert up.lines == [
        f"triton-gateway: port {port} cannot be used (address already in use); choose another with {flag}"
    ]


@pytest.mark.parametrize("name", ["my models", "a&b", "a;b", "$a", "a'b", "(a)", "a*", "\u00e9"])
def test_path_that_the_python_backend_does_not_support_is_refused(
    tmp_path: Path, name: str
) -> None:
    odd, plain = tmp_path / name, tmp_path / "plain"
    write_model(odd)
    with pytest.raises(CannotStart, match="cannot run a model at") as refused:
        TritonOptions((odd,)).validate()
    assert f"'{odd}'" in str(refused.value)
    write_model(plain)
    (plain / "echo").rename(plain / name)
    with pytest.raises(CannotStart) as refused:
        TritonOptions((plain,)).validate()
    assert f"'{plain / name}'" in str(refused.value)
    (tmp_path / "link").symlink_to(odd)
    TritonOptions((tmp_path / "link",), load_models=("*",)).validate()


def test_unsupported_path_is_reported_at_once_and_a_link_to_it_is_served(tmp_path: Path) -> None:
    odd, link = tmp_path / "my models", tmp_path / "a-_.+@=,%:~^!#b"
    write_model(odd)
    with Up(odd) as up:
        assert up.end() == 1
    assert "does not support paths with a space; rename it, or use a symbolic link" in up.lines[-1]
    assert len(up.lines) == 1
    link.symlink_to(odd)
    with Up(link) as up:
        up.wait_for("ready after")
        assert up.infer().json()["outputs"] == {"OUT": [1.5, 2.5]}


@pytest.mark.long
def test_files_folders_and_repositories_are_served_together(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("given")
    file = folder / "my classifier.onnx"
    file.write_bytes(network.classifier())
    texts = folder / "texts"
    (texts / "1").mkdir(parents=True)
    (texts / "1" / "model.onnx").write_bytes(network.texts())
    temporary = folder / "tmp"
    temporary.mkdir()
    paths = [str(path) for path in (file, texts, repository)]
    environment = {"TMPDIR": str(temporary)}
    with Up(None, *paths, auto_complete=True, environment=environment) as up:
        up.wait_for("ready after")
        assert up.infer().json()["outputs"] == {"OUT": [1.5, 2.5]}
        body = {"inputs": {"words": ["a"], "numbers": [[1], [2]]}}
        answer = httpx.post(f"{up.url}/v1/models/texts/infer", json=body, timeout=TIMEOUT_S)
        assert answer.json()["outputs"] == {"same words": ["a"], "same numbers": [[1], [2]]}
        described = up.get("/v1/models/my_classifier").json()
        assert described["outputs"] == [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [1000]}]
        assert list(temporary.iterdir())
        with nothing_left(up, brief=True):
            os.kill(up.pid, signal.SIGTERM)
        assert up.end() == 0
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("command", ["up", "triton"])
def test_file_that_is_not_a_model_is_named(tmp_path: Path, command: str) -> None:
    (tmp_path / "net.onnx").write_text("a letter")
    with Up(None, str(tmp_path / "net.onnx"), command=command, auto_complete=True) as up:
        assert up.end() == 1
    sentence = "Triton could not load net: net.onnx is not an ONNX file, or it is incomplete"
    assert up.lines[-1] == f"triton-gateway: {sentence}"


def test_triton_command_serves_and_leaves_no_process(repository: Path) -> None:
    with Up(repository, command="triton") as triton:
        triton.wait_for("Triton is ready")
        assert lives(triton.triton)
        with nothing_left(triton, brief=True):
            os.kill(triton.pid, signal.SIGINT)
        assert triton.end() == 130


def test_triton_command_logs_json_alone_and_ends_well_at_sigterm(repository: Path) -> None:
    log_format = {"GATEWAY_LOG_FORMAT": "json"}
    with Up(repository, command="triton", environment=log_format) as triton:
        triton.wait_for("Triton is ready")
        os.kill(triton.pid, signal.SIGTERM)
        assert triton.end() == 0
    lines = [json.loads(line) for line in triton.lines]
    assert any("successfully loaded 'echo'" in line["message"] for line in lines)
    for line in lines:
        assert (line.get("source") == "triton") == line["message"].startswith("Triton: "), line
    # The reason of a start that fails is one of its lines.
    environment = {**log_format, "GATEWAY_MAX_BODY_BYTES": "many"}
    with Command("serve", environment=environment) as serve:
        assert serve.end() == 1
    (line,) = map(json.loads, serve.lines)
    assert line["level"] == "error"
    assert "GATEWAY_MAX_BODY_BYTES cannot be 'many'" in line["message"]


def test_triton_command_listens_on_the_given_host(repository: Path) -> None:
    """An address other than 127.0.0.1, where gateways of other machines can reach it."""
    with Up(repository, "--host", "127.0.0.2", command="triton") as triton:
        triton.wait_for("Triton is ready")
        assert lives(triton.triton.replace("127.0.0.1", "127.0.0.2"))
        with pytest.raises(httpx.ConnectError):
            lives(triton.triton)
        assert "does not check keys" not in "".join(triton.lines)  # which is still this machine


@pytest.mark.long
def test_first_start_without_a_network_names_the_package_index(
    tmp_path: Path, repository: Path
) -> None:
    (closed,) = free_ports(1)
    environment = {
        "TRITON_GATEWAY_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"http://127.0.0.1:{closed}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
    }
    (gateway,) = free_ports(1)
    arguments = ("up", "--port", str(gateway), "--model-repository", str(repository))
    with Command(*arguments, environment=environment) as up:
        assert up.end() == 1
    step, error = up.lines  # and no output of pip
    assert step == "installing the models' Python environment, 35 MB (first start only)"
    assert "the package index cannot be reached" in error
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]


def test_models_run_with_another_python_if_the_gateways_is_too_new() -> None:
    versions = Path.home() / ".pyenv" / "versions"
    newer = sorted(versions.glob("3.1[3-9].*/bin/python"))
    suitable = sorted(versions.glob("3.1[0-2].*/bin"))
    if not newer or not suitable:
        pytest.skip("a Python newer than 3.12, or one that is not, is missing on this machine")
    code = "from gateway.embedded.installation import find_models_python, CannotInstall\n"
    code += "try: print(find_models_python())\nexcept CannotInstall as exc: print(exc)"

    def find(path: Path) -> str:
        return subprocess.run(
            [newer[-1], "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": str(path), "PYTHONPATH": str(ROOT)},
        ).stdout

    assert f"executable='{suitable[-1]}/python3.1" in find(suitable[-1])
    missing = find(Path("/nowhere"))
    assert "CPython 3.10 to 3.12" in missing
    assert "uv python install 3.12" in missing
    assert "Docker" in missing


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("GATEWAY_MAX_BODY_BYTES", "many", "GATEWAY_MAX_BODY_BYTES cannot be 'many'"),
        ("GATEWAY_TRITON_URLS", "ftp://x", "'ftp://x' is not a valid address"),
    ],
)
def test_setting_that_is_invalid_is_named(setting: str, value: str, words: str) -> None:
    with Command("serve", environment={setting: value}) as serve:
        assert serve.end() == 1
    assert words in serve.lines[-1]
