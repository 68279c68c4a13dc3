"""The installations: the overlays and the chart, each in a namespace of its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml
from tritonclient.grpc import service_pb2

from tests.cluster.kubectl import ClusterError, format_list
from tests.cluster.resources import GATEWAY, SECRETS, fit_overlay, list_secrets, render_prod
from tests.cluster.scene import Run
from tests.support.helm import CHART
from tests.support.manifests import Resource
from tests.support.servers import ROOT

TEXT_MODEL: Final = "text_ensemble"
DECLARED: Final = ("ensemble", TEXT_MODEL)
SENTENCE: Final = {"inputs": {"TEXT": "The ship left the harbour at dawn."}}
INFER_TEXT: Final = f"/v1/models/{TEXT_MODEL}/infer"
IMAGE: Final = ROOT / "docs" / "images" / "seven.png"


def encode_text_request() -> bytes:
    """Return the sentence as a message of Triton's gRPC API."""
    text = SENTENCE["inputs"]["TEXT"].encode()
    message = service_pb2.ModelInferRequest(model_name=TEXT_MODEL)
    message.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    return bytes(message.SerializeToString())


# Each kind with its rate per second: 30 requests together with the streams.
LOAD: Final[Sequence[Mapping[str, Any]]] = (
    {"kind": "unary", "path": INFER_TEXT, "json": SENTENCE, "rate": 8},
    {
        "kind": "new connection",
        "path": INFER_TEXT,
        "json": SENTENCE,
        "keeps_connection": False,
        "rate": 5,
    },
    {
        "kind": "image",
        "path": f"/v1/models/{DECLARED[0]}/infer",
        "content_type": "image/png",
        "base64": base64.b64encode(IMAGE.read_bytes()).decode(),
        "rate": 6,
    },
    {
        "kind": "gRPC",
        "is_grpc": True,
        "base64": base64.b64encode(encode_text_request()).decode(),
        "rate": 5,
    },
    {
        "kind": "new gRPC channel",
        "is_grpc": True,
        "base64": base64.b64encode(encode_text_request()).decode(),
        "keeps_connection": False,
        "rate": 2,
    },
)
TEXT_STREAMS: Final[Sequence[Mapping[str, Any]]] = (
    {"kind": "stream", "path": INFER_TEXT, "json": SENTENCE, "is_stream": True, "rate": 4},
)
# What an installation may leave behind: the user's Secrets, the claim of Redis, and Kubernetes' own objects.
KINDS: Final = (
    "deployments,statefulsets,pods,services,networkpolicies,poddisruptionbudgets,configmaps"
)
OWN_CONFIG_MAPS: Final = ("kube-root-ca.crt", "openshift-service-ca.crt")


class Installation:
    """Two gateways with keys and a Redis before two Tritons, as objects or as a release of the chart."""

    name = ""
    load: Final = (*LOAD, *TEXT_STREAMS)
    wishes: Final = dict.fromkeys(DECLARED, True)

    def __init__(self, run: Run) -> None:
        self.namespace = run.find_namespace(self.name)
        self.run = run

    def install(self) -> None:
        raise NotImplementedError

    def apply_again(self) -> None:
        """Apply the same objects, as every deployment does."""
        raise NotImplementedError

    def uninstall(self) -> None:
        raise NotImplementedError

    def list_objects(self) -> list[Resource]:
        """Return the objects that were applied."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise `ClusterError` if another `apply` of the same objects would change any."""
        changes = self.run.cluster.find_changes(self.list_objects(), self.namespace)
        if changes:
            changed = [line for line in changes.splitlines() if line.startswith("diff ")]
            raise ClusterError(f"`kubectl diff` right after shows {len(changed)} changed objects")

    def check_uninstalled(self) -> None:
        """Raise `ClusterError` if something is left, or the user's Secrets are not."""
        found = self.run.cluster.list_objects(KINDS, self.namespace)
        left = [
            f"{each['kind']} {each['metadata']['name']}"
            for each in found
            if each["metadata"]["name"] not in OWN_CONFIG_MAPS
            and "deletionTimestamp" not in each["metadata"]
        ]
        if left:
            raise ClusterError(f"left after uninstalling: {', '.join(left)}")
        secrets = self.run.cluster.list_objects("secrets", self.namespace)
        kept = {each["metadata"]["name"] for each in secrets}
        if not kept >= set(SECRETS):
            raise ClusterError(f"uninstalling deleted {', '.join(sorted(set(SECRETS) - kept))}")


class Prod(Installation):
    """The overlay, with what the page tells the owner of small nodes to add to it."""

    name = "prod"

    def install(self) -> None:
        self.run.cluster.apply(list_secrets(), self.namespace)
        self.apply_again()

    def apply_again(self) -> None:
        self.run.cluster.apply(self.list_objects(), self.namespace)

    def uninstall(self) -> None:
        text = format_list(self.list_objects())
        words = ("delete", "--namespace", self.namespace, "--filename", "-", "--cascade=foreground")
        self.run.cluster.run(*words, stdin=text, timeout_s=300)

    def list_objects(self) -> list[Resource]:
        kinds = self.run.cluster.list_kinds()
        return fit_overlay(render_prod(self.namespace), kinds, self.run.images, self.run.name)


class Chart(Installation):
    """The same numbers from the chart."""

    name = "chart"

    def install(self) -> None:
        self.run.cluster.apply(list_secrets(), self.namespace)
        words = ("install", GATEWAY, str(CHART), "--namespace", self.namespace, "--values", "-")
        self.run.cluster.helm(*words, stdin=json.dumps(build_values(self.run.images)))

    def apply_again(self) -> None:
        words = ("upgrade", GATEWAY, str(CHART), "--namespace", self.namespace, "--reuse-values")
        self.run.cluster.helm(*words)

    def uninstall(self) -> None:
        words = ("uninstall", GATEWAY, "--namespace", self.namespace)
        self.run.cluster.helm(*words, "--wait", "--cascade", "foreground", timeout_s=300)

    def list_objects(self) -> list[Resource]:
        words = ("get", "manifest", GATEWAY, "--namespace", self.namespace)
        documents = yaml.load_all(self.run.cluster.helm(*words), yaml.CSafeLoader)
        return [each for each in documents if each]


def build_values(images: Mapping[str, str]) -> dict[str, Any]:
    """Return values of a user with small nodes: two Tritons without a GPU, and a Redis."""
    storage = {"ephemeral-storage": "512Mi"}
    values: dict[str, Any] = {
        "gateway": {
            "autoscaling": {"cpuPercent": 280},
            "resources": {
                "requests": {"cpu": "250m", "memory": "384Mi"},
                "limits": {"memory": "2Gi", **storage},
            },
            "image": split_image(images["gateway"]),
        },
        "triton": {
            "replicas": 2,
            "cpuOnly": {
                "enabled": True,
                "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
                "image": split_image(images["embedded"]),
            },
        },
        "redis": {"enabled": True},
    }
    if "redis" in images:
        values["redis"]["image"] = images["redis"]
    return values


def split_image(image: str) -> dict[str, str]:
    repository, _, digest = image.partition("@")
    if digest:
        return {"repository": repository, "digest": digest}
    repository, _, tag = image.rpartition(":")
    return {"repository": repository, "tag": tag}
