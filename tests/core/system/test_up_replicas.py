"""`triton-gateway up --replicas N`: a fleet with one command, which ends as cleanly as one Triton does."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.support.servers import free_ports
from tests.support.up import Up, nothing_left, write_model
from tests.support.wait import TIMEOUT_S, wait_until

# In `initialize`: the first Triton to come loads for ten minutes, the second fails at once.
SECOND_FAILS = """try:
            os.mkdir({folder!r})
        except FileExistsError:
            raise ValueError('no weights here') from None
        time.sleep(600)"""


def serves(triton: str) -> bool:
    url = f"http://{triton}/v2/models/echo/ready"
    return httpx.get(url, timeout=TIMEOUT_S).status_code == 200


def lives(up: Up) -> bool:
    return up.get("/livez").status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_starts_all_replicas_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_model(tmp_path)
    # Without the tests' own guard, which would clean up in its place.
    with Up(tmp_path, guarded=False, replicas=2) as up:
        up.wait_for("ready after")
        assert [serves(triton) for triton in up.tritons] == [True, True]
        assert lives(up)
        for triton in up.tritons:
            up.wait_for(f"{triton}: Triton: successfully loaded 'echo'")
        with nothing_left(up, brief=number is signal.SIGINT):
            os.kill(up.pid, number)


@pytest.mark.long
def test_up_continues_with_the_other_replicas_until_none_is_left(tmp_path: Path) -> None:
    write_model(tmp_path)
    with Up(tmp_path, replicas=2) as up:
        up.wait_for("ready after")
        first, second = up.tritons
        up.servers()[1].kill()
        assert up.wait_for("restarting it").startswith(f"{second}: Triton exited with status")
        assert serves(first)
        assert lives(up)
        up.wait_for(f"{second}: Triton is ready again")
        assert serves(second)

        write_model(tmp_path, "raise ValueError('the weights are gone')")
        up.servers()[0].kill()
        gone = up.wait_for(f"{first}: Triton cannot be restarted")
        assert gone.endswith("the weights are gone; the gateway continues with the other replicas")
        assert serves(second)
        assert lives(up)

        up.servers()[0].kill()
        assert up.end() == 1
        assert up.lines[-1].startswith(f"triton-gateway: {second}: Triton cannot be restarted")


def test_replica_that_does_not_start_ends_up_with_its_reason(tmp_path: Path) -> None:
    write_model(tmp_path, SECOND_FAILS.format(folder=str(tmp_path / "first")))
    with Up(tmp_path, replicas=2) as up:
        assert up.end() == 1
    assert up.lines[-1] in {
        f"triton-gateway: {triton}: Triton could not load echo: no weights here"
        for triton in up.tritons
    }


def test_up_ends_all_replicas_while_they_are_starting(tmp_path: Path) -> None:
    write_model(tmp_path, "time.sleep(600)")
    with Up(tmp_path, replicas=2) as up:
        wait_until(lambda: len(up.stubs()) == 2)
        assert len(up.servers()) == 2
        with nothing_left(up):
            os.kill(up.pid, signal.SIGTERM)
        assert up.end() == 143


def test_port_in_use_of_another_replica_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1, 100)
    with (
        socket.create_server(("127.0.0.1", port + 100)),
        Up(tmp_path, "--triton-grpc-port", str(port), replicas=2) as up,
    ):
        assert up.end() == 1
    taken = f"port {port + 100} cannot be used (address already in use)"
    assert up.lines == [f"triton-gateway: {taken}; choose another with --triton-grpc-port (+ 100)"]
