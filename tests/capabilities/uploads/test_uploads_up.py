"""Uploads to the folder of models that `up` serves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.errors import assert_error
from tests.support.up import Up, write_model
from tests.support.wait import TIMEOUT_S


@pytest.mark.long
def test_up_lists_the_files_of_its_folder_and_accepts_data_only(tmp_path: Path) -> None:
    write_model(tmp_path)
    with Up(tmp_path, replicas=2) as up:
        up.wait_for("ready after")
        listed = up.get("/v1/models/echo/files").json()["files"]
        assert [file["path"] for file in listed] == ["1/model.py", "config.pbtxt"]
        code = {"model": ("model.py", b"import os")}
        refused = httpx.put(f"{up.url}/v1/models/added", files=code, timeout=TIMEOUT_S)
        assert_error(refused, 422, "INVALID_MODEL_FILE", "or: triton-gateway up FOLDER")
