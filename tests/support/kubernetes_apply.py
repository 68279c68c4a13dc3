"""What `kubectl apply` would change in a cluster to which the same manifests were just applied.

kubectl sends a patch of the fields in which a manifest differs from the object of the server. The server has
added defaults and dropped what is empty; in a list without a merge key, which is compared as a whole, both
are differences that every apply sends again. So is a field that the server has added to an object whose keys
are to be retained, as those of a Deployment's strategy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, Final

from tests.support.kubernetes_schemas import CUSTOM, KUBERNETES, schema_of, validator
from tests.support.manifests import Resource

Schema = dict[str, Any]
MERGE_KEY: Final = "x-kubernetes-patch-merge-key"
PATCH_STRATEGY: Final = "x-kubernetes-patch-strategy"
# pkg/apis/*/v1/defaults.go of Kubernetes, by definition.
DEFAULTS: Final[dict[str, Schema]] = {
    "apps.v1.DeploymentStrategy": {"type": "RollingUpdate"},
    "core.v1.ConfigMapVolumeSource": {"defaultMode": 420},
    "core.v1.Container": {
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
    },
    "core.v1.ContainerPort": {"protocol": "TCP"},
    "core.v1.HTTPGetAction": {"scheme": "HTTP"},
    "core.v1.ObjectFieldSelector": {"apiVersion": "v1"},
    "core.v1.PersistentVolumeClaim": {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "status": {"phase": "Pending"},
    },
    "core.v1.PersistentVolumeClaimSpec": {"volumeMode": "Filesystem"},
    "core.v1.PodSpec": {
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
    },
    "core.v1.Probe": {
        "failureThreshold": 3,
        "periodSeconds": 10,
        "successThreshold": 1,
        "timeoutSeconds": 1,
    },
    "core.v1.SecretVolumeSource": {"defaultMode": 420},
    "core.v1.ServicePort": {"protocol": "TCP"},
    "core.v1.ServiceSpec": {"sessionAffinity": "None", "type": "ClusterIP"},
    "autoscaling.v2.HPAScalingRules": {"selectPolicy": "Max"},
    "networking.v1.NetworkPolicyPort": {"protocol": "TCP"},
}
# The defaults of the Gateway API's schemas, by field. The patch of a custom resource knows no merge keys.
CUSTOM_DEFAULTS: Final[dict[str, Schema]] = {
    "parentRefs": {"group": "gateway.networking.k8s.io", "kind": "Gateway"},
    "backendRefs": {"group": "", "kind": "Service", "weight": 1},
    "path": {"type": "PathPrefix", "value": "/"},
    "method": {"type": "Exact"},
}
BINARY_UNITS: Final = ("Ki", "Mi", "Gi", "Ti")


def find_changes(resource: Resource) -> list[str]:
    """Return the paths of the fields that an apply of an unchanged object would send."""
    return find_changes_of(json.dumps(resource))


@cache  # the variants have most of their resources in common
def find_changes_of(document: str) -> list[str]:
    resource = json.loads(document)
    name = f"{resource['kind']}/{resource['metadata']['name']}"
    if resource["kind"] in CUSTOM:
        found = list(compare(resource, store_custom(resource), {}))
    else:
        schema = validator(KUBERNETES[-1], resource["kind"], resource["apiVersion"]).schema
        found = list(compare(resource, store(resource, schema), schema))
    return [f"{name}{path}" for path in found]


def resolve(schema: Schema) -> tuple[str, Schema]:
    """Return the definition that a schema refers to, and its name without the prefix."""
    reference = schema.get("$ref", "").rpartition("/")[2]
    if not reference:
        return "", schema
    return reference.removeprefix("io.k8s.api."), schema_of(KUBERNETES[-1], "_definitions")[
        "$defs"
    ][reference]


def is_omitted(value: Any) -> bool:
    return value is None or value == []


def store(value: Any, schema: Schema) -> Any:
    """Return a value as the server stores it: with defaults, without what is empty, in short quantities."""
    name, definition = resolve(schema)
    if name.endswith(".resource.Quantity"):
        return shorten(str(value))
    if isinstance(value, list):
        return [store(item, definition.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = definition.get("properties", {})
    other = definition.get("additionalProperties") or {}
    stored = {
        key: store(item, properties.get(key, other))
        for key, item in value.items()
        if not is_omitted(item)
    }
    return DEFAULTS.get(name, {}) | stored


def store_custom(value: Any, name: str = "") -> Any:
    if isinstance(value, list):
        return [store_custom(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    stored = {key: store_custom(item, key) for key, item in value.items()}
    return CUSTOM_DEFAULTS.get(name, {}) | stored


def shorten(quantity: str) -> str:
    for unit, larger in pairwise(BINARY_UNITS):
        number = quantity.removesuffix(unit)
        if number != quantity and Fraction(number) % 1024 == 0:
            quantity = f"{Fraction(number) / 1024}{larger}"
    number = quantity.removesuffix("m")
    if number != quantity and Fraction(number) % 1000 == 0:
        return str(Fraction(number) / 1000)
    return quantity


def compare(manifest: Any, stored: Any, schema: Schema, path: str = "") -> Iterator[str]:
    _, definition = resolve(schema)
    if isinstance(manifest, dict) and isinstance(stored, dict):
        if schema.get(PATCH_STRATEGY) == "retainKeys" and stored.keys() - manifest.keys():
            yield path
        properties = definition.get("properties", {})
        other = definition.get("additionalProperties") or {}
        for key, value in manifest.items():
            if key not in stored:
                yield f"{path}.{key}"
            else:
                yield from compare(value, stored[key], properties.get(key, other), f"{path}.{key}")
    elif (key := schema.get(MERGE_KEY)) and isinstance(manifest, list):
        existing = {item[key]: item for item in stored}
        for item in manifest:
            place = f"{path}[{item[key]}]"
            yield from compare(item, existing[item[key]], schema["items"], place)
    elif manifest != stored:
        yield path
