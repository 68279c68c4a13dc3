"""What others make of the API description: a linter, and two generators of clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.clients.comparison import OTHERS
from tests.support.keys import bearer, entry, written
from tests.support.missing import find_program, format_reason
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import ROOT, gateway_before

KEY = "tgw_a-key-of-generated-clients"
MODELS = ("single_BYTES", "nhwc", "optional")
FOLDER = ROOT / "tests" / "generators"
GENERATOR = Path(OTHERS).with_name("openapi-python-client")
# openapi-python-client 0.29.1: `*args: Any` is handed on as `object`.
OWN_FAULT = re.compile(r'generated/client\.py:\d+: error: Argument 1 to "__a?exit__" of ')
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def service(
    zoo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("service")
    settings = {
        "keys_file": str(written(folder / "keys.yaml", [entry(KEY, "admin")])),
        "jobs": f"sqlite:///{folder / 'jobs'}",
        "dialects": "torchserve",
    }
    with gateway_before(zoo_triton.options.url, **settings) as client:
        client.headers.update(bearer(KEY))
        Zoo(client, AS_WRITTEN).load(*MODELS)
        yield client


@pytest.fixture(scope="module")
def documents(service: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the files of the recorded description, of that with keys, and of those of models."""
    folder = tmp_path_factory.mktemp("documents")
    paths = ["/openapi.json", *(f"/v1/models/{name}/openapi.json" for name in MODELS)]
    files = [ROOT / "docs" / "openapi.json"]
    for number, path in enumerate(paths):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(service.get(path).raise_for_status().json()))
        files.append(file)
    return files


def run_node(program: str, *arguments: str) -> None:
    find_program("node", "nodejs npm")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip(format_reason(program, "make crds"))
    command = [str(FOLDER / "node_modules" / ".bin" / program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_descriptions_have_no_errors_of_redocly(documents: list[Path]) -> None:
    run_node("redocly", "lint", *map(str, documents))


def test_openapi_typescript_generates_types_of_each_description(documents: list[Path]) -> None:
    types = [str(document.parent / f"{document.stem}.ts") for document in documents[1:]]
    for document, output in zip(documents[1:], types, strict=True):
        run_node("openapi-typescript", str(document), f"--output={output}")
    run_node("tsc", "--noEmit", "--strict", *types)


def test_openapi_python_client_generates_a_client_that_works(
    service: httpx.Client, documents: list[Path], tmp_path: Path
) -> None:
    if not GENERATOR.exists():
        pytest.skip(format_reason("openapi-python-client", "make clients"))
    command = [str(GENERATOR), "generate", f"--path={documents[1]}", "--meta=none"]
    command += [f"--output-path={tmp_path / 'generated'}"]
    generated = subprocess.run(command, capture_output=True, text=True)
    assert generated.returncode == 0, generated.stderr
    # It knows no bodies of images, texts, arrays and lines, and leaves out nothing else.
    assert "Unable to" not in generated.stdout + generated.stderr
    (tmp_path / "calls.py").write_text((FOLDER / "calls.py").read_text())
    check = [sys.executable, "-m", "mypy", f"--python-executable={OTHERS}", "generated", "calls.py"]
    check += ["--config-file=", "--no-error-summary"]
    found = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert [line for line in found if not OWN_FAULT.match(line)] == []
    called = subprocess.run(
        [OTHERS, "calls.py", str(service.base_url), KEY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert called.returncode == 0, called.stderr
