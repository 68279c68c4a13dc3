"""The port on which `up` serves gRPC."""

from __future__ import annotations

import socket

import pytest

from gateway.server.launch import GRPC_PORT, GRPC_PORT_SETTING, choose_grpc_settings

HOST = "127.0.0.77"  # whose ports no server of the tests uses


def test_up_chooses_tritons_usual_grpc_port_if_it_is_free_and_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(GRPC_PORT_SETTING, raising=False)
    assert choose_grpc_settings(HOST, [8000, 9001]) == {"grpc_port": GRPC_PORT}
    assert choose_grpc_settings(HOST, [8000, GRPC_PORT]) == {}
    with socket.create_server((HOST, GRPC_PORT)):
        assert choose_grpc_settings(HOST, [8000, 9001]) == {}
    for value in ("0", "9100"):
        monkeypatch.setenv(GRPC_PORT_SETTING, value)
        assert choose_grpc_settings(HOST, [8000, 9001]) == {}
