"""The cluster, through the programs kubectl and helm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Container, Sequence
from typing import Any, Final

from tests.support.kubernetes_tools import kubernetes_program
from tests.support.manifests import Resource

TIMEOUT_S: Final = 120.0


class ClusterError(Exception):
    """A command failed, or the cluster cannot be used."""


def find_program(name: str) -> str:
    """Return the installed program, which fits the cluster, or that of the test environment."""
    return shutil.which(name) or kubernetes_program(name)


def run_command(
    command: Sequence[str],
    *,
    stdin: str = "",
    timeout_s: float = TIMEOUT_S,
    accepted: Container[int] = (0,),
) -> str:
    """Return what a command prints. Raises `ClusterError` for another exit status than the accepted ones."""
    try:
        ended = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)}: not done after {timeout_s:g} s") from None
    if ended.returncode not in accepted:
        raise ClusterError(f"{' '.join(command)}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


class Cluster:
    """The cluster of one context, which every command names: a change of the current one changes nothing."""

    def __init__(self, context: str) -> None:
        self._kubectl = (find_program("kubectl"), "--context", context)
        self._helm = (find_program("helm"), "--kube-context", context)

    def run(self, *arguments: str, **options: Any) -> str:
        return run_command([*self._kubectl, *arguments], **options)

    def helm(self, *arguments: str, **options: Any) -> str:
        return run_command([*self._helm, *arguments], **options)

    def list_objects(self, kind: str, namespace: str = "", selector: str = "") -> list[Resource]:
        scope = ("--namespace", namespace) if namespace else ("--all-namespaces",)
        text = self.run("get", kind, *scope, "--selector", selector, "--output", "json")
        items: list[Resource] = json.loads(text)["items"]
        return items

    def get_object(self, kind: str, name: str, namespace: str) -> Resource:
        text = self.run("get", kind, name, "--namespace", namespace, "--output", "json")
        resource: Resource = json.loads(text)
        return resource

    def apply(self, resources: Sequence[Resource], namespace: str) -> None:
        self.run("apply", "--namespace", namespace, "--filename", "-", stdin=format_list(resources))

    def find_changes(self, resources: Sequence[Resource], namespace: str) -> str:
        """Return what `kubectl diff` prints: what another `apply` would change."""
        arguments = ("diff", "--namespace", namespace, "--filename", "-")
        return self.run(*arguments, stdin=format_list(resources), accepted=(0, 1))

    def execute(
        self, namespace: str, pod: str, container: str, *command: str, **options: Any
    ) -> str:
        words = ("exec", "--stdin", "--namespace", namespace, pod, "--container", container, "--")
        return self.run(*words, *command, **options)

    def list_kinds(self) -> set[str]:
        """Return the kinds of objects that the cluster knows."""
        lines = self.run("api-resources", "--no-headers").splitlines()
        return {line.split()[-1] for line in lines if line.strip()}


def format_list(resources: Sequence[Resource]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(resources)})


def connect(context: str) -> Cluster:
    """Return the cluster of the current context, which must have this name.

    Raises `ClusterError` otherwise: nobody disturbs a cluster by mistake.
    """
    current = run_command([find_program("kubectl"), "config", "current-context"]).strip()
    if not context:
        raise ClusterError(
            f"the current context is '{current}'; to disturb that cluster, name it: "
            f"make test-cluster CLUSTER_CONTEXT={current}"
        )
    if context != current:
        raise ClusterError(
            f"CLUSTER_CONTEXT is '{context}', but the current context is '{current}': "
            f"kubectl config use-context {context}"
        )
    return Cluster(context)
