"""Folders of models, as Triton reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_model_folder(folder: Path, config: str, files: Mapping[str, str | bytes]) -> None:
    """Write the files by their paths in the folder, and the config unless it is empty."""
    if config:
        files = {**files, "config.pbtxt": config}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
