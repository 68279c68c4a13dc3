"""Notebooks of the documentation: run their cells, record what they print, render them as Markdown.

python -m deploy.site.notebooks records what docs/notebooks print with the gateway at TRITON_GATEWAY_URL. The
cells only print, so that plain Python runs them: Jupyter's kernel would be 40 more packages in the lock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NOTEBOOKS: Final = Path(__file__).parents[2] / "docs" / "notebooks"
RUN_CELLS: Final = """
import contextlib, io, json, sys
scope, outputs = {"__name__": "__main__"}, []
for number, source in enumerate(json.load(sys.stdin), 1):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, f"<cell {number}>", "exec"), scope)
    outputs.append(printed.getvalue())
json.dump(outputs, sys.stdout)
"""

Notebook = dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    return dict(json.loads(path.read_text()))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def recorded_output(cell: Mapping[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_cells(path: Path, gateway_url: str) -> list[str]:
    """Run the cells in order in a new process, in the notebook's folder; return what each one prints.

    Raises `subprocess.CalledProcessError` with the traceback on standard error.
    """
    sources = ["".join(cell["source"]) for cell in code_cells(read_notebook(path))]
    result = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=json.dumps(sources),
        env={**os.environ, "TRITON_GATEWAY_URL": gateway_url},
        cwd=path.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return [str(text) for text in json.loads(result.stdout)]


def record(path: Path, outputs: list[str]) -> None:
    notebook = read_notebook(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["execution_count"] = number
        cell["outputs"] = [stream] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def format_notebook(path: Path) -> str:
    """Return a notebook as Markdown, with a link to the file itself as the last line."""
    parts = []
    for cell in read_notebook(path)["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if output := recorded_output(cell).rstrip():
            parts.append(f"```text\n{output}\n```")
    parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        notebook_path = NOTEBOOKS / f"{name}.ipynb"
        url = os.environ.get("TRITON_GATEWAY_URL", "http://localhost:8080")
        record(notebook_path, run_cells(notebook_path, url))
