"""Write a software bill of materials (CycloneDX 1.6) of a lock file: python -m deploy.sbom LOCK PYTHON.

It lists exactly the packages that `pip install -r LOCK` installs on Linux for that version of Python, with
the hashes that pip accepts. The same lock always gives the same document.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from gateway import __version__

REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==(\S+?)(?:\s*;\s*(.*?))?\s*\\?$", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
NAMESPACE = uuid.UUID("6f9a1e52-3c0f-5d5c-9a53-0f7f4f6f2b11")


class LockedPackage(NamedTuple):
    name: str
    version: str
    hashes: tuple[str, ...]


def read_lock(text: str, python: str) -> list[LockedPackage]:
    """Return the packages of the lock for this Python, such as 3.11, on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    matches = [*REQUIREMENT.finditer(text)]
    ends = [match.start() for match in matches[1:]] + [len(text)]
    return [
        LockedPackage(
            canonicalize_name(match[1]),
            match[2],
            tuple(HASH.findall(text[match.end() : end])),
        )
        for match, end in zip(matches, ends, strict=True)
        if not match[3] or Marker(match[3]).evaluate(environment)
    ]


def build_sbom(text: str, python: str) -> dict[str, Any]:
    application = f"pkg:pypi/triton-gateway@{__version__}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, __version__ + python + text)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": application,
                "name": "triton-gateway",
                "version": __version__,
                "purl": application,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [build_component(package) for package in read_lock(text, python)],
    }


def build_component(package: LockedPackage) -> dict[str, Any]:
    purl = f"pkg:pypi/{package.name}@{package.version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        # One for each file of the package; the image contains one of them.
        "hashes": [{"alg": "SHA-256", "content": content} for content in package.hashes],
    }


if __name__ == "__main__":
    lock, python_version = sys.argv[1:]
    document = build_sbom(Path(lock).read_text(), python_version)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
