"""The rules as the Prometheus operator takes them; `make manifests` puts them into k8s/components."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
FILES = ("rules.yml", "alerts.yml")


class Dumper(yaml.SafeDumper):
    """Expressions of several lines stay readable."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


Dumper.add_representer(str, Dumper.represent_str)


def document() -> dict[str, Any]:
    groups = [
        group for name in FILES for group in yaml.safe_load((FOLDER / name).read_text())["groups"]
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "triton-gateway",
            "labels": {"app.kubernetes.io/name": "triton-gateway"},
        },
        "spec": {"groups": groups},
    }


def text() -> str:
    return "# Written by `make manifests` from deploy/monitoring; change it there.\n" + yaml.dump(
        document(), Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True
    )


if __name__ == "__main__":
    sys.stdout.write(text())
