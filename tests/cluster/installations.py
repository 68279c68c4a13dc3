"""The installations: the overlays and the chart, each in a namespace of its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml
from tritonclient.grpc import service_pb2

from tests.cluster.kubectl import ClusterError, format_list
from tests.cluster.resources import (
    CHANGING,
    GATEWAY,
    SECRETS,
    STREAMING,
    add_test_models,
    fit_overlay,
    list_scalers,
    list_secrets,
    read_number_of_tritons,
    read_small_patches,
    render_overlay,
)
from tests.cluster.scene import Run
from tests.support.helm import CHART
from tests.support.manifests import Resource
from tests.support.servers import ROOT

TEXT_MODEL: Final = "text_ensemble"
DECLARED: Final = ("ensemble", TEXT_MODEL)
SENTENCE: Final = {"inputs": {"TEXT": "The ship left the harbour at dawn."}}
STREAM: Final = {"inputs": {"FROM": 5, "SECONDS": 0.2}}
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
STREAMS: Final[Sequence[Mapping[str, Any]]] = (
    {
        "kind": "stream",
        "path": f"/v1/models/{STREAMING}/infer",
        "json": STREAM,
        "is_stream": True,
        "rate": 4,
    },
)
TEXT_STREAMS: Final[Sequence[Mapping[str, Any]]] = (
    {"kind": "stream", "path": INFER_TEXT, "json": SENTENCE, "is_stream": True, "rate": 4},
)
# More than the Tritons of one target of KEDA have at a time.
MANY_STREAMS: Final = tuple({**each, "rate": 24, "most": 24} for each in STREAMS)
# What an installation may leave behind: the user's Secrets, the claim of Redis, and Kubernetes' own objects.
KINDS: Final = (
    "deployments,statefulsets,pods,services,networkpolicies,poddisruptionbudgets,configmaps"
)
OWN_CONFIG_MAPS: Final = ("kube-root-ca.crt", "openshift-service-ca.crt")


class Installation:
    """Objects of `kubectl apply`, or a release of the chart."""

    has_keys = True
    # The autoscaler starts the second one.
    gateways = 2
    load: Sequence[Mapping[str, Any]] = ()

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self.namespace = run.find_namespace(name)
        self.run = run
        self.wishes: Mapping[str, bool] = dict.fromkeys(DECLARED, True)

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
        if self.has_keys and not kept >= set(SECRETS):
            raise ClusterError(f"uninstalling deleted {', '.join(sorted(set(SECRETS) - kept))}")


class OverlayInstallation(Installation):
    components: Sequence[str] = ("cpu-only",)

    def install(self) -> None:
        if self.has_keys:
            self.run.cluster.apply(list_secrets(), self.namespace)
        self.run.cluster.apply(self.list_objects(), self.namespace)

    def apply_again(self) -> None:
        self.run.cluster.apply(self.list_objects(), self.namespace)

    def uninstall(self) -> None:
        text = format_list(self.list_objects())
        words = ("delete", "--namespace", self.namespace, "--filename", "-", "--cascade=foreground")
        self.run.cluster.run(*words, stdin=text, timeout_s=300)

    def render_all(self, overlay: str) -> list[Resource]:
        return render_overlay(overlay, self.namespace, self.components, self.find_changes(overlay))

    def find_changes(self, overlay: str) -> Mapping[str, Any]:
        """Return what the page tells the owner of small nodes to add to the overlay."""
        return read_small_patches() if overlay == "prod" else {}

    def render(self, overlay: str) -> list[Resource]:
        kinds = self.run.cluster.list_kinds()
        return fit_overlay(self.render_all(overlay), kinds, self.run.images, self.run.name)


class Dev(OverlayInstallation):
    """One gateway without keys before one Triton."""

    has_keys = False
    gateways = 1
    load = (*LOAD, *TEXT_STREAMS)
    components = ()

    def list_objects(self) -> list[Resource]:
        return self.render("dev")


class Prod(OverlayInstallation):
    """Two gateways with keys and a Redis before two Tritons, which also have models of the test."""

    load = (*LOAD, *STREAMS)

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run, name)
        self.wishes = {**self.wishes, STREAMING: True, CHANGING: False}

    def find_changes(self, overlay: str) -> Mapping[str, Any]:
        return {**super().find_changes(overlay), **read_number_of_tritons()}

    def list_objects(self) -> list[Resource]:
        return add_test_models(self.render("prod"))


class Zero(OverlayInstallation):
    """Tritons that KEDA starts with the first request, in a namespace with another name.

    There is one gateway, which KEDA asks: Prometheus, which would know the demand of several, is not there.
    """

    components = ("cpu-only", "keda-zero")

    def find_changes(self, overlay: str) -> Mapping[str, Any]:
        changes = super().find_changes(overlay)
        target = {"kind": "HorizontalPodAutoscaler", "name": GATEWAY}
        limits = [
            {"op": "replace", "path": f"/spec/{name}", "value": 1}
            for name in ("minReplicas", "maxReplicas")
        ]
        single = {"target": target, "patch": json.dumps(limits)}
        return {**changes, "patches": [*changes["patches"], single]}

    def install(self) -> None:
        """Install all but the ScaledObject."""
        self.run.cluster.apply(list_secrets(), self.namespace)
        self.run.cluster.apply(add_test_models(self.render("prod")), self.namespace)

    def start_scaling(self) -> None:
        self.run.cluster.apply(list_scalers(self.namespace), self.namespace)

    def list_objects(self) -> list[Resource]:
        return [*add_test_models(self.render("prod")), *list_scalers(self.namespace)]


class Chart(Installation):
    """The same numbers from the chart, with its own models."""

    load = (*LOAD, *TEXT_STREAMS)

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
