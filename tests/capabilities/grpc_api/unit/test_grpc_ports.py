"""The port on which `up` serves gRPC."""

from __future__ import annotations

import socket

import pytest

from gateway.capabilities.capability import LaunchPlan
from gateway.capabilities.grpc_api.capability import PORT_SETTING, USUAL_PORT, can_use_usual_port
from gateway.config.settings import Settings

HOST = "127.0.0.77"  # whose ports no server of the tests uses


def test_up_chooses_the_usual_grpc_port_of_triton_if_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PORT_SETTING, raising=False)
    plan = LaunchPlan(Settings(), HOST, {"--port": 8000, "--triton-grpc-port": 9001})
    assert can_use_usual_port(plan)
    assert not can_use_usual_port(LaunchPlan(Settings(), HOST, {"--port": USUAL_PORT}))
    with socket.create_server((HOST, USUAL_PORT)):
        assert not can_use_usual_port(plan)
    for value in ("0", "9100"):
        monkeypatch.setenv(PORT_SETTING, value)
        assert not can_use_usual_port(plan)
