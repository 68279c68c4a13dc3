"""What `triton-gateway up` and `triton-gateway triton` pass to Triton, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import typer.main
from typer.testing import CliRunner

from gateway.cli import root_cli
from gateway.embedded.log_filter import LogFilter
from gateway.embedded.model_paths import exclude_startup_models
from gateway.embedded.options import CannotStart, ModelControl, TritonOptions
from tests.support.scripted_server import serving
from tests.support.servers import ROOT
from tests.support.up import Up, write_model
from tests.support.wait import TIMEOUT_S


def test_flags_are_passed_to_triton(tmp_path: Path) -> None:
    """With --no-exit-on-error, a model that fails at the start does not end it."""
    write_model(tmp_path)
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "config.pbtxt").write_text((tmp_path / "echo/config.pbtxt").read_text())
    (tmp_path / "bad" / "1" / "model.py").write_text("raise ValueError('no weights here')")
    flags = ["--no-exit-on-error", "--log-verbose", "1"]
    flags += ["--backend-config", "python,shm-default-byte-size=4194304"]
    flags += ["--triton-arg", "--id=frieda", "--triton-arg", "--http-thread-count"]
    flags += ["--triton-arg", "4"]
    secret = {"GATEWAY_STATE_PASSWORD": "a-secret"}
    with Up(tmp_path, *flags, auto_complete=True, environment=secret) as up:
        up.wait_for("ready after")
        up.wait_for("failed to load 'bad'")
        assert up.infer().json()["outputs"] == {"OUT": [1.5, 2.5]}
        assert up.get("/readyz").status_code == 200
        ready = httpx.get(f"http://{up.triton}/v2/health/ready", timeout=TIMEOUT_S)
        assert ready.status_code == 200  # Triton itself, with a model that failed
        server = httpx.get(f"http://{up.triton}/v2", timeout=TIMEOUT_S).json()
        assert server["name"] == "frieda"
        listening = up.server().net_connections("tcp")
        addresses = {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1", "::ffff:127.0.0.1"}  # of gRPC
        # The code of a model does not see the gateway's secrets.
        assert not [name for name in up.stubs()[0].environ() if name.startswith("GATEWAY_")]
        command = up.server().cmdline()
        assert "--backend-config=python,shm-default-byte-size=4194304" in command
        assert command[-3:] == ["--id=frieda", "--http-thread-count", "4"]
        up.wait_for("Server side auto-completed config")  # which Triton says when it is verbose
        up.wait_for("no weights here")


# Refused before anything is started.


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("--http-port=9", "use --triton-http-port"),
        ("--http-po=9", "use --triton-http-port"),
        ("--metrics-address=0.0.0.0", "the embedded Triton listens on 127.0.0.1"),
        ("--model-store=/x", "use --model-repository"),
        ("--model-control-mode", "use --model-control"),
        ("--log-verbose=1", "use --log-verbose"),
        ("--allow-grpc=false", "the gateway requires all three ports"),
        ("--log-file=/tmp/x", "the gateway reads the reasons of failures from the log"),
    ],
)
def test_triton_argument_that_the_gateway_sets_is_refused(
    tmp_path: Path, argument: str, why: str
) -> None:
    with pytest.raises(CannotStart) as refused:
        TritonOptions((tmp_path,), extra_arguments=("--id", "x", argument)).validate()
    assert str(refused.value) == f"--triton-arg does not accept {argument}: {why}"


@pytest.mark.parametrize("argument", ["--id=x", "--model-load-thread-count=1", "http-port", "--"])
def test_other_triton_argument_is_accepted(tmp_path: Path, argument: str) -> None:
    TritonOptions((tmp_path,), extra_arguments=(argument,)).validate()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"poll_interval_s": 1}, "--poll-secs requires --model-control poll; in mode explicit"),
        (
            {"poll_interval_s": 1, "model_control": ModelControl.none},
            "in mode none Triton does not scan",
        ),
        (
            {"load_models": ("echo",), "model_control": ModelControl.poll},
            "--load requires --model-control explicit; in mode poll Triton loads every model",
        ),
        (
            {"backend_configs": ("python,shm-region-prefix-name=x",)},
            "--backend-config does not accept python,shm-region-prefix-name=x",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(CannotStart, match=why):
        TritonOptions((tmp_path,), **options).validate()


def test_repository_address_that_triton_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="s3://, gs:// and as://"):
        TritonOptions((tmp_path, "hdfs://x/y")).validate()
    TritonOptions((tmp_path, "s3://bucket/x", "gs://bucket/x", "as://account/x")).validate()


@pytest.mark.parametrize(
    ("load", "patterns", "started"),
    [
        (("*",), ["*"], ()),
        (("*",), ["b*"], ("alpha",)),
        (("alpha", "beta"), ["beta"], ("alpha",)),
    ],
)
def test_on_demand_models_are_not_loaded_at_the_start(
    tmp_path: Path, load: tuple[str, ...], patterns: list[str], started: tuple[str, ...]
) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / name / "1").mkdir(parents=True)
    options = exclude_startup_models(TritonOptions((tmp_path,), load), patterns)
    assert options.load_models == started


def test_on_demand_models_require_a_repository_that_can_be_listed(tmp_path: Path) -> None:
    remote = TritonOptions(("s3://bucket/models",), ("*",))
    assert exclude_startup_models(remote, ["*"]).load_models == ()
    with pytest.raises(CannotStart, match="name those to load at startup with --load"):
        exclude_startup_models(remote, ["b*"])
    polled = TritonOptions((tmp_path,), model_control=ModelControl.poll)
    with pytest.raises(CannotStart, match="--on-demand requires --model-control explicit"):
        exclude_startup_models(polled, ["*"])


# A repository in an object store.


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def test_object_store_that_rejects_triton_is_named() -> None:
    closed = {"": lambda script: script.answer(403, b"")}
    with serving(by_path=closed) as server:
        address = f"{server.url.replace('http', 's3')}/bucket/models"
        with Up(address, command="triton", environment=CREDENTIALS) as triton:
            assert triton.end() == 1
    assert triton.lines[-1].startswith(f"triton-gateway: Triton cannot start with {address}: ")
    assert "Check account credentials" in triton.lines[-1]


# Log lines.

FAILS = (
    'E1121 15:25:32.216984 23132 backend_model.cc:692] "ERROR: Failed to create instance: no weights"',
    "E1121 15:25:32.219178 23132 model_lifecycle.cc:642] \"failed to load 'bad' version 1: no weights\"",
)


def test_model_that_fails_at_every_poll_is_logged_once() -> None:
    log_filter = LogFilter()
    assert [log_filter.filter_line(line) is None for line in FAILS * 3] == [False] * 2 + [True] * 4
    loaded = "I1121 15:25:33.839000 23132 model_lifecycle.cc:839] \"successfully loaded 'bad'\""
    assert log_filter.filter_line(loaded)
    assert log_filter.filter_line(FAILS[1]) == "Triton: failed to load 'bad': no weights"


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            "instance group a_0 of model a has kind KIND_GPU but no GPUs are available",
            "without the kind, Triton uses a GPU only if there is one; see triton-gateway doctor",
        ),
        (
            "Invalid model name: Could not determine backend for model 'a' with no backend",
            "its version folder must contain model.onnx or model.py, or its config must name the backend",
        ),
    ],
)
def test_failed_load_is_logged_with_advice(reason: str, advice: str) -> None:
    line = f"E1121 15:25:33.839000 23132 model_lifecycle.cc:642] \"failed to load 'a' version 1: {reason}\""
    assert LogFilter().filter_line(line) == f"Triton: failed to load 'a': {reason}; {advice}"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_reason_why_triton_finds_no_gpu_is_shown_if_there_is_one(has_gpu: bool) -> None:
    line = 'W1121 15:25:32.216984 23132 metrics.cc:811] "DCGM unable to start: DCGM initialization error"'
    shown = "Triton: DCGM unable to start: DCGM initialization error"
    assert LogFilter(has_gpu=has_gpu).filter_line(line) == (shown if has_gpu else None)


@pytest.mark.parametrize("command", ["up", "triton"])
def test_help_lists_the_flags_for_triton(command: str) -> None:
    shown = CliRunner().invoke(root_cli, [command, "--help"], env={"COLUMNS": "200"}).output
    for flag in ("--triton-arg", "--poll-secs", "--no-exit-on-error", "--triton-http-port"):
        assert flag in shown
    assert ("--replicas" in shown) == (command == "up")


def test_documented_flags_are_those_of_the_command() -> None:
    rows = re.findall(
        r"^\| `(--.*?)` \|", (ROOT / "docs/operate/deploy.md").read_text(), re.MULTILINE
    )
    documented = {flag.strip("`") for row in rows for flag in re.split(r"`?, `?", row)}
    up = typer.main.get_command(root_cli).commands["up"]  # type: ignore[attr-defined]
    options = [param for param in up.params if param.param_type_name == "option"]
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert documented == flags - {"--help", "-h"}
