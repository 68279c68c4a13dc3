"""A release: the bill of materials is the lock, and the workflow has only the rights that it needs."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from deploy.sbom import build_sbom, read_lock
from gateway import __version__
from tests.support.servers import ROOT

LOCK = (ROOT / "requirements" / "image.txt").read_text()
CHART = ROOT / "deploy" / "helm" / "triton-gateway"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_sbom_of_the_lock_lists_exactly_its_packages() -> None:
    sbom = build_sbom(LOCK, "3.11")
    listed = {component["purl"] for component in sbom["components"]}
    locked = re.findall(r"^(\S+)==(\S+) ;(.*)$", LOCK, re.MULTILINE)
    markers = {
        f"pkg:pypi/{canonicalize_name(name)}@{version}": marker for name, version, marker in locked
    }
    assert listed <= markers.keys()
    # What is left out is for another version of Python or another system.
    for left_out in markers.keys() - listed:
        assert re.search("python_full_version <|darwin|win32", markers[left_out]), left_out
    hashes = [entry["content"] for part in sbom["components"] for entry in part["hashes"]]
    assert set(hashes) <= set(re.findall(r"--hash=sha256:(\w{64})", LOCK))
    assert all(part["hashes"] for part in sbom["components"])
    required = {
        canonicalize_name(re.split(r"[\[<>=;! ]", text)[0])
        for text in metadata.requires("triton-gateway") or ()
        if "extra ==" not in text
    }
    assert len(required) > 15
    assert required <= {package.name for package in read_lock(LOCK, "3.11")}
    assert required <= {component["name"] for component in sbom["components"]}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_pins_every_action_by_its_commit(workflow: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_release_job_has_only_the_rights_that_it_needs() -> None:
    assert RELEASE["permissions"] == {}
    rights = {name: job["permissions"] for name, job in RELEASE["jobs"].items()}
    assert rights["packages"] == {"contents": "read"}
    # Trusted publishing: a token of the workflow, no password, after a review of the environment.
    assert rights["pypi"] == {"id-token": "write"}
    # Only the documentation's branch and the release are written to the repository.
    writes = [name for name, right in rights.items() if right.get("contents") == "write"]
    assert writes == ["site", "release"]
    assert [rights[name] for name in writes] == [{"contents": "write"}] * 2
    assert RELEASE["jobs"]["pypi"]["environment"] == "pypi"
    assert "password" not in json.dumps(RELEASE["jobs"]["pypi"]["steps"])
    secrets = set(re.findall(r"secrets\.(\w+)", json.dumps(RELEASE)))
    assert secrets == {"GITHUB_TOKEN"}
    for job in RELEASE["jobs"].values():
        for step in job["steps"]:
            # Expressions in a script would be code of whoever chooses the values.
            assert "${{" not in step.get("run", "")


def script(job: str) -> str:
    steps = RELEASE["jobs"][job]["steps"]
    return "\n".join(step["run"].strip() for step in steps if "run" in step)


def test_version_in_every_file_is_that_of_the_package() -> None:
    places = {
        "Dockerfile": rf"^ARG VERSION={re.escape(__version__)}$",
        "deploy/helm/triton-gateway/Chart.yaml": rf"^appVersion: {re.escape(__version__)}$",
        "k8s/base/kustomization.yaml": rf"newTag: {re.escape(__version__)}}}",
        "compose.yaml": rf"image: triton-gateway:{re.escape(__version__)}$",
    }
    for path, pattern in places.items():
        assert re.search(pattern, (ROOT / path).read_text(), re.MULTILINE), path
    folders = ("docs", "k8s", "deploy")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    tags = re.compile(r"(?:triton-gateway[\w-]*:|newTag: |[?]ref=v)(\d+\.\d+\.\d+)")
    found = {
        (path.name, tag)
        for path in [*files, ROOT / "compose.yaml"]
        if path.suffix in {".md", ".yaml", ".yml"}
        for tag in tags.findall(path.read_text())
    }
    assert {name for name, _ in found} >= {
        "deploy.md",
        "kubernetes.md",
        "compose.yaml",
        "Chart.yaml",
    }
    assert {tag for _, tag in found} == {__version__}


def test_release_publishes_the_documented_images() -> None:
    base = "ghcr.io/triton-gateway/triton-gateway"
    document = (ROOT / "docs/operate/deploy.md").read_text()
    job = RELEASE["jobs"]["images"]
    assert job["env"]["IMAGE"].startswith("ghcr.io/${{ github.repository }}")
    built = job["strategy"]["matrix"]["include"]
    assert {
        (each["target"], each["architecture"], each["runner"].endswith("-arm")) for each in built
    } == {
        ("gateway", "amd64", False),
        ("gateway", "arm64", True),
        ("embedded", "amd64", False),
    }
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    published = {
        f"{base}{'' if each['target'] == 'gateway' else '-' + each['target']}:{__version__}"
        for each in built
    }
    listed = yaml.safe_load(annotations["artifacthub.io/images"])
    assert {each["image"] for each in listed} == published
    assert all(f"`{image}`" in document for image in published)
    assert "oci://ghcr.io/triton-gateway/charts/triton-gateway" in document
    assert '"oci://ghcr.io/$GITHUB_REPOSITORY_OWNER/charts"' in script("tags")
