"""The notebooks of the documentation print, with real models, what is recorded in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.site.notebooks import (
    NOTEBOOKS,
    code_cells,
    format_notebook,
    read_notebook,
    recorded_output,
    run_cells,
)
from tests.support.servers import ROOT, gateway_before, triton_with

# The notebooks about the models of the demonstration.
DEMONSTRATION = ("classification", "embeddings")


@pytest.fixture(scope="module")
def examples_gateway() -> Iterator[httpx.Client]:
    with (
        triton_with((ROOT / "triton_repo_examples",), ("tokens",)) as triton,
        gateway_before(triton.options.url) as client,
    ):
        yield client


def assert_prints_what_is_recorded(name: str, gateway: httpx.Client) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    recorded = [recorded_output(cell) for cell in code_cells(read_notebook(path))]
    assert "".join(recorded), f"record it: python -m deploy.site.notebooks {name}"
    assert run_cells(path, str(gateway.base_url).rstrip("/")) == recorded


@pytest.mark.long
@pytest.mark.parametrize("name", DEMONSTRATION)
def test_notebook_of_the_demonstration_prints_what_is_recorded(
    demo: httpx.Client, name: str
) -> None:
    assert_prints_what_is_recorded(name, demo)


def test_notebook_about_streams_prints_what_is_recorded(examples_gateway: httpx.Client) -> None:
    assert_prints_what_is_recorded("streaming", examples_gateway)


def test_page_of_a_notebook_shows_text_code_and_output(tmp_path: Path) -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {*DEMONSTRATION, "streaming"}
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title\n", "text"]},
            {
                "cell_type": "code",
                "source": ["print(1)\n", "print(2)"],
                "outputs": [{"text": ["1\n", "2\n"]}],
            },
            {"cell_type": "code", "source": ["a = 1"], "outputs": []},
        ]
    }
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps(notebook))
    assert run_cells(path, "http://127.0.0.1:9") == ["1\n2\n", ""]
    assert format_notebook(path) == (
        "# Title\ntext\n\n```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```\n\n"
        "```python\na = 1\n```\n\n[Download this notebook](small.ipynb)\n"
    )
