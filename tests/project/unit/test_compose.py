"""The services of compose.yaml; the images themselves are run by test_containers.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import Settings, list_setting_names
from gateway.repository.models_file import parse_models_file
from tests.support.servers import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def seconds(written: str) -> float:
    return float(written.removesuffix("s"))


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_an_exact_version_its_mounts_and_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", service["image"])
    for volume in service.get("volumes", []):
        source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0]
        if source.startswith("."):
            assert (ROOT / source).is_file(), source
            assert volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


def test_services_publish_only_gateway_and_monitoring() -> None:
    published = {name for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway", "prometheus", "grafana"}
    for name in published:
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    assert COMPOSE["networks"]["back"] == {"internal": True}
    for name in ("triton", "embedded", "redis"):
        assert list(SERVICES[name]["networks"]) == ["back"]


def test_profile_adds_one_triton_which_the_gateway_finds() -> None:
    profiles = {
        name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service
    }
    assert profiles == {"embedded": ["cpu"], "triton": ["gpu"]}
    urls = SERVICES["gateway"]["environment"]["GATEWAY_TRITON_URLS"]
    assert urls == "${GATEWAY_TRITON_URLS:-dns+http://triton:8000}"
    assert SERVICES["embedded"]["networks"]["back"]["aliases"] == ["triton"]
    assert "--strict-readiness=false" in SERVICES["triton"]["command"]
    words = " ".join(SERVICES["triton"]["command"])
    declared = parse_models_file((ROOT / "k8s/base/models.yaml").read_text())
    assert re.findall(r"--load-model=(\S+)", words) == list(declared)


def test_gateway_stops_after_the_longest_request() -> None:
    given = SERVICES["gateway"]["environment"]
    known = {f"GATEWAY_{name.upper()}" for name in list_setting_names(*SETTINGS)}
    assert given.keys() <= known
    settings = Settings.model_validate(
        {name.removeprefix("GATEWAY_").lower(): value for name, value in given.items()}
    )
    assert settings.max_request_timeout_s <= settings.shutdown_s
    grace_s = seconds(SERVICES["gateway"]["stop_grace_period"])
    assert grace_s > settings.drain_s + settings.shutdown_s
    triton = SERVICES["triton"]
    (exit_s,) = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(triton["command"]))
    assert settings.max_request_timeout_s < int(exit_s) < seconds(triton["stop_grace_period"])
