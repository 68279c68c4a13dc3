"""compose.yaml and the Dockerfile agree; the images themselves are run by system/test_containers.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import Settings, list_setting_names
from gateway.repository.models_file import parse_models_file
from tests.support.servers import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
IMAGES = ("gateway", "triton", "embedded")


def seconds(written: str) -> float:
    return float(written.removesuffix("s"))


def stage(name: str) -> str:
    (text,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)


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


def test_services_publish_only_the_gateway_and_the_monitoring_to_this_machine() -> None:
    published = {name for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway", "prometheus", "grafana"}
    for name in published:
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    assert COMPOSE["networks"]["back"] == {"internal": True}
    for name in ("triton", "embedded", "redis"):
        assert list(SERVICES[name]["networks"]) == ["back"]


def test_profile_adds_one_triton_which_the_gateway_finds_by_its_name() -> None:
    profiles = {
        name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service
    }
    assert profiles == {"embedded": ["cpu"], "triton": ["gpu"]}
    urls = SERVICES["gateway"]["environment"]["GATEWAY_TRITON_URLS"]
    assert urls == "${GATEWAY_TRITON_URLS:-dns+http://triton:8000}"
    assert SERVICES["embedded"]["networks"]["back"]["aliases"] == ["triton"]
    assert "--strict-readiness=false" in SERVICES["triton"]["command"]
    assert '"--strict-readiness=false"' in stage("triton")
    words = " ".join(SERVICES["triton"]["command"])
    declared = parse_models_file((ROOT / "k8s/base/models.yaml").read_text())
    assert re.findall(r"--load-model=(\S+)", words) == list(declared)


def test_gateway_has_known_settings_and_stops_after_the_longest_request() -> None:
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


def test_monitoring_has_the_rules_the_job_and_the_dashboard_of_the_repository() -> None:
    known = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    ours = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    assert ours["rule_files"] == known["rule_files"]
    assert ours["scrape_configs"][0]["job_name"] == known["scrape_configs"][0]["job_name"]
    folder = ROOT / "deploy" / "compose" / "grafana"
    (source,) = yaml.safe_load((folder / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    shown = mounts["./deploy/monitoring/dashboard.json"]
    assert str(Path(shown).parent) == provider["options"]["path"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == shown


# The Dockerfile


def test_dockerfile_base_is_an_argument_of_an_exact_version() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    outside = {base for base, _ in STAGES} - {name for _, name in STAGES}
    assert outside == {"${PYTHON_IMAGE}", "${GATEWAY_IMAGE}", "${TRITON_IMAGE}"}
    assert re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-\w+", arguments["PYTHON_IMAGE"])
    # Debian 12's Python is 3.11, and there are no tags of exact versions.
    assert arguments["GATEWAY_IMAGE"] == "gcr.io/distroless/python3-debian12:nonroot"
    assert set(re.findall(r"python(3\.\d+)/", DOCKERFILE)) == {"3.11"}
    assert re.fullmatch(r"\d\d\.\d\d", arguments["TRITON_VERSION"])
    assert arguments["VERSION"] == __version__
    for tag in re.findall(r"triton-gateway\S*:(\d\S*)", (ROOT / "compose.yaml").read_text()):
        assert tag.startswith(arguments["VERSION"])
    for tag in (SERVICES["triton"]["image"], (ROOT / "k8s/base/kustomization.yaml").read_text()):
        assert f"-{arguments['TRITON_VERSION']}" in tag


@pytest.mark.parametrize("image", IMAGES)
def test_image_has_its_labels_an_ordinary_user_and_a_health_check(image: str) -> None:
    text = stage(image)
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', text))
    assert labels.keys() == {
        *("title", "description", "version", "revision", "licenses", "vendor"),
        *("source", "url", "documentation", "base.name", "base.digest"),
    }
    (base,) = re.findall(rf"^FROM \$\{{(\w+)_IMAGE\}} AS {image}$", DOCKERFILE, re.MULTILINE)
    assert labels["base.name"] == f"${{{base}_IMAGE}}"
    assert labels["base.digest"] == f"${{{base}_DIGEST}}"
    for name in ("VERSION", "REVISION", f"{base}_IMAGE", f"{base}_DIGEST"):
        assert re.search(rf"^ARG .*\b{name}\b", text, re.MULTILINE)
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE)
    assert "\nHEALTHCHECK " in text
    assert "\nSTOPSIGNAL SIGTERM\n" in text


def test_dockerfile_installs_what_is_locked_by_its_hash_in_stages_that_are_thrown_away() -> None:
    for image in ("gateway", "embedded"):
        # What needs a shell, pip or the network belongs to a stage that no image contains.
        assert not re.search(r"^(RUN|ADD)\b", stage(image), re.MULTILINE)
    commands = re.sub(r"\\\n", " ", DOCKERFILE)
    for words in re.findall(r"-m pip (?:--python \S+ )?install ([^&\n]*)", commands):
        assert "--require-hashes" in words or "--no-index" in words, words
        assert "--no-deps" in words


def test_bytecode_of_every_image_is_the_same_in_each_build() -> None:
    """pip compiles in a folder with a random name, and with timestamps: it must not compile at all."""
    assert "PIP_COMPILE=0" in stage("tools")
    commands = re.sub(r"\\\n", " ", stage("triton"))
    (install,) = re.findall(r"-m pip install ([^&\n]*)", commands)
    assert "--no-compile" in install
    for name in ("packages", "build", "server", "triton"):
        compiled = re.findall(r"-m compileall ([^&\n]*)", re.sub(r"\\\n", " ", stage(name)))
        assert compiled, name
        assert all("--invalidation-mode unchecked-hash" in words for words in compiled)


def test_models_of_the_gpu_image_run_in_the_environment_of_the_first_python_in_the_path() -> None:
    text = stage("triton")
    (variables,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    environment = dict(re.findall(r"(\w+)=(\S+)", variables))
    folder = environment["VIRTUAL_ENV"]
    assert environment["PATH"].startswith(f"{folder}/bin:")
    assert "PYTHONPATH" not in environment  # which Triton 24.10 ignores
    assert f"-m venv --without-pip --system-site-packages {folder}" in text
    assert re.search(r"^RUN python3 /opt/check_python_model.py /opt/triton_repo \w+$", text, re.M)


def test_dockerignore_allows_only_what_the_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {
        word
        for words in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in words.split()
    }
    for word in copied:
        assert (ROOT / word).exists(), word
    assert {word if word in allowed else word.partition("/")[0] for word in copied} == allowed
