"""Keys files for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

INFER = "tgw_infer-secret"
METRICS = "tgw_metrics-secret"
ADMIN = "tgw_admin-secret"


TEXTS = "tgw_texts-secret"
TEXTS_ADMIN = "tgw_texts-admin-secret"
BOTH = "tgw_both-secret"


# For whom a route or method is.
FREE = "open"
INFERENCE = "infer"
SCRAPING = "metrics"
MANAGEMENT = "admin"
MAY = {
    FREE: {"", INFER, METRICS, ADMIN},
    INFERENCE: {INFER, ADMIN},
    SCRAPING: {METRICS, ADMIN},
    MANAGEMENT: {ADMIN},
}


SECRETS = (INFER, METRICS, ADMIN, TEXTS, TEXTS_ADMIN, BOTH)


def entry(key: str, *roles: str, name: str = "", **more: Any) -> dict[str, Any]:
    name = name or key.removeprefix("tgw_").removesuffix("-secret")
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"name": name, "sha256": digest, "roles": list(roles), **more}


ENTRIES = [
    entry(INFER, "infer"),
    entry(METRICS, "metrics"),
    entry(ADMIN, "admin"),
    entry(TEXTS, "infer", "metrics", models=["text_*"]),
    entry(TEXTS_ADMIN, "admin", models=["text_*"]),
    entry(BOTH, "infer", "metrics"),
]


def written(path: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Replace the file atomically, as Kubernetes and `key create` do."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(yaml.safe_dump({"keys": list(entries)}))
    return fresh.replace(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
