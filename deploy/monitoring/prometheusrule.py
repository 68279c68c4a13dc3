"""The rules as the Prometheus operator takes them; `make manifests` puts them into k8s/components.

With the address of docs/ as an argument, it first writes that into the alerts' `runbook_url`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
FILES = ("rules.yml", "alerts.yml")
WITH_RUNBOOKS = ("alerts.yml", "alerts_test.yml")
RUNBOOK = re.compile(r"(?<=runbook_url: )\S+(?=/monitoring\.md#)")


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


def replace_runbooks(alerts: str, base_url: str) -> str:
    """Return the text of the alerts with runbooks below this address."""
    return RUNBOOK.sub(base_url.rstrip("/"), alerts)


if __name__ == "__main__":
    for address in sys.argv[1:]:
        for name in WITH_RUNBOOKS:
            path = FOLDER / name
            path.write_text(replace_runbooks(path.read_text(), address))
    sys.stdout.write(text())
