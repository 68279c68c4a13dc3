"""Settings: what cannot be is refused in a sentence that names it, and what is none is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from gateway.config.settings import Settings, describe_unknown_settings, read_settings
from gateway.messages import CommandError


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(f"GATEWAY_{name}", value)
    with pytest.raises(CommandError) as refused:
        read_settings()
    sentence = str(refused.value)
    assert "Value error" not in sentence
    return sentence


DURATIONS = (
    "LOAD_TIMEOUT_S",
    "MAX_REQUEST_TIMEOUT_S",
    "REQUEST_TIMEOUT_S",
    "DRAIN_S",
    "SHUTDOWN_S",
    "KEEP_ALIVE_S",
)
# For each setting: an invalid value, and what the sentence begins with.
INVALID = (
    *((name, value, "") for name in DURATIONS for value in ("inf", "nan", "1e300", "-1", "-inf")),
    *(
        ("OTLP_ENDPOINT", value, "it is not a valid URL; use https://HOST:PORT/PATH")
        for value in ("foo", "collector:4318", "ftp://x", "http://", "http://x:y")
    ),
    ("REQUEST_TIMEOUT_S", "400", "it exceeds GATEWAY_MAX_REQUEST_TIMEOUT_S, which is 300"),
    ("TRITON_URLS", " , ", "at least one Triton URL is required"),
    (
        "CORS_ORIGINS",
        "https://a.test,b.test",
        "'b.test' is not a valid origin; use https://HOST or https://HOST:PORT",
    ),
    ("LOCAL_ADMIN", "maybe", ""),
    ("TLS_CERT_FILE", "/nope", "the certificate cannot be read: no such file or directory"),
    ("TLS_KEY_FILE", "/nope", "GATEWAY_TLS_CERT_FILE is missing"),
    (
        "TLS_CLIENT_AUTH",
        "optional",
        "no certificate is asked for without GATEWAY_TLS_CLIENT_CA_FILE",
    ),
)


def test_invalid_setting_is_explained(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for name, value, reason in INVALID:
        with subtests.test(f"{name}={value}"), monkeypatch.context() as environment:
            sentence = refusal(environment, **{name: value})
            assert sentence.startswith(f"GATEWAY_{name} cannot be '{value}': {reason}")
    sentence = refusal(monkeypatch, TRITON_URLS="")
    assert sentence == "GATEWAY_TRITON_URLS cannot be empty: at least one Triton URL is required"


def test_secret_is_read_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "password"
    monkeypatch.setenv("GATEWAY_STATE_PASSWORD_FILE", str(path))
    path.write_text("it's @ secret\r\n")
    settings = read_settings()
    assert settings.state_password == SecretStr("it's @ secret")
    assert "secret'" not in repr(settings)
    # The value is validated as that of the variable is, and not shown.
    (tmp_path / "api").write_text("short")
    api = {"TRITON_RESTRICTED_API_FILE": str(tmp_path / "api")}
    with monkeypatch.context() as environment:
        reason = refusal(environment, **api)
    assert reason.startswith("GATEWAY_TRITON_RESTRICTED_API is invalid: expected KEY=SECRET")
    assert "short" not in reason
    given = f"GATEWAY_STATE_PASSWORD_FILE cannot be '{path}': "
    for content in (b"\n", b"\xff", b"a\nb"):
        path.write_bytes(content)
        assert refusal(monkeypatch) == f"{given}the file is empty or not one line"
    path.unlink()
    assert refusal(monkeypatch) == f"{given}no such file or directory"
    both = "GATEWAY_STATE_PASSWORD and GATEWAY_STATE_PASSWORD_FILE are both set; unset one"
    assert refusal(monkeypatch, STATE_PASSWORD="x") == both


def test_argument_comes_before_the_environment_and_a_limit_before_a_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_MAX_REQUEST_TIMEOUT_S", "20")
    monkeypatch.setenv("GATEWAY_DRAIN_S", "3")
    settings = read_settings(drain_s=5)
    assert (settings.drain_s, settings.request_timeout_s) == (5, 20)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("POLL_INTERVAL_S", "its value is fixed"), ("GRPC_HOST", "gRPC listens where --host says")],
)
def test_removed_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    sentence = refusal(monkeypatch, **{name: "0.5"})
    assert sentence == f"GATEWAY_{name} is no longer a setting; unset it: {advice}"
    assert Settings().poll_interval_s == 0.5
    assert Settings(poll_interval_s=0.1).poll_interval_s == 0.1


def test_certificate_and_key_must_match(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key, other = (tmp_path / name for name in ("cert.pem", "key.pem", "other.pem"))
    authority = trustme.CA()
    issued = authority.issue_cert("gateway.test")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    authority.issue_cert("gateway.test").private_key_pem.write_to_path(other)
    given = {"TLS_CERT_FILE": str(certificate), "TLS_KEY_FILE": str(key)}
    for name, value in given.items():
        monkeypatch.setenv(f"GATEWAY_{name}", value)
    assert read_settings().tls_key_file == key
    for wrong, why in (("/nope", "no such file"), (str(other), "mismatch")):
        message = refusal(monkeypatch, TLS_KEY_FILE=wrong)
        assert message.startswith(f"GATEWAY_TLS_KEY_FILE cannot be '{wrong}': ")
        assert why in message
    monkeypatch.delenv("GATEWAY_TLS_KEY_FILE")
    message = refusal(monkeypatch)
    assert message.startswith("GATEWAY_TLS_KEY_FILE cannot be empty: ")
    assert refusal(monkeypatch, TLS_CERT_FILE=str(key)).startswith("GATEWAY_TLS_CERT_FILE cannot")


@pytest.mark.parametrize(
    "url",
    ["http://me:secret@x:8000", "me:secret@x", "http://me:secret,secret@x", "http://secret@x"],
)
def test_password_in_an_address_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    message = refusal(monkeypatch, TRITON_URLS=f"http://a:8000,{url}")
    assert message.startswith("GATEWAY_TRITON_URLS cannot be '…@x")
    assert "secret" not in message


def test_unknown_setting_is_reported_with_the_similar_one() -> None:
    assert describe_unknown_settings(
        ["GATEWAY_MAX_BODY_BYTE", "GATEWAY_QXJZ", "GATEWAY_DRAIN_S", "GATEWAY_URL", "PATH"]
    ) == [
        "unknown setting GATEWAY_MAX_BODY_BYTE; did you mean GATEWAY_MAX_BODY_BYTES?",
        "unknown setting GATEWAY_QXJZ",
    ]
    of_services = ["PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8080_TCP"]
    of_services += ["PORT_8080_TCP_ADDR", "KEYS_SERVICE_HOST", "KEYS_PORT_80_TCP_PROTO"]
    assert describe_unknown_settings(f"GATEWAY_{name}" for name in of_services) == []
