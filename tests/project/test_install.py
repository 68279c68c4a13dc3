"""Installing locked packages with uv and with pip, from an index that only pip's configuration names."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.servers import ROOT

UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
WHEEL = "greeting-1.0-py3-none-any.whl"
UNREACHABLE = "the package index cannot be reached"
ONLY_ONCE = "only the first start requires the network"
REAL = f'exec {UV} "$@"'


@dataclass(frozen=True)
class Checkout:
    """A folder with the script, a lock, and the configuration of pip."""

    folder: Path
    address: str

    def install(self, program: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Install with a `uv` that is the shell script `program`, or with none in PATH."""
        if program:
            (self.folder / "uv").write_text(f"#!/bin/sh\n{program}\n")
            (self.folder / "uv").chmod(0o755)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        configured = {
            "HOME": str(self.folder.parent / "home"),  # with the caches of pip and uv
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": str(self.folder / "pip.conf"),
            "PIP_RETRIES": "0",
        }
        command = [sys.executable, "install.py", "--fetch-uv", *options, "a test", "environment"]
        command += ["lock.txt"]
        environment = inherited | configured
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )

    def greet(self) -> str:
        command = [str(self.folder / "environment/bin/python"), "-c", "import greeting"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def lock(self, digest: str) -> None:
        (self.folder / "lock.txt").write_text(f"greeting==1.0 --hash=sha256:{digest}\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    files = tmp_path / "mirror" / "greeting"
    files.mkdir(parents=True)
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(files / WHEEL, "w") as wheel:
        wheel.writestr("greeting.py", "print('hello')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (files / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path / "checkout"
    folder.mkdir()
    address = f"127.0.0.1:{server.server_address[1]}"
    (folder / "constraints.txt").write_text("greeting<2\n")
    (folder / "pip.conf").write_text(
        f"[global]\nindex-url = http://{address}/\nconstraint = {folder}/constraints.txt\n"
    )
    shutil.copy(ROOT / "requirements/install.py", folder)
    shutil.copy(ROOT / "requirements/uv.txt", folder)
    # Without its own pip, which takes ten times as long: it is installed into with that of the tests.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True
    )
    checkout = Checkout(folder, address)
    checkout.lock(hashlib.sha256((files / WHEEL).read_bytes()).hexdigest())
    try:
        yield checkout
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(UV is None, reason="uv is missing: make .venv/.dev")
@pytest.mark.parametrize(
    ("program", "result"),
    [
        (REAL, "MB in s with uv"),
        ("echo 'error: no space' >&2; exit 2", "uv failed (no space); MB in s with pip"),
        pytest.param(
            "exec sleep 600",
            "uv failed (no result after 1 s); MB in s with pip",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "",
            f"uv failed ({UNREACHABLE} or lacks a locked package; {ONLY_ONCE}); MB in s with pip",
            marks=pytest.mark.long,
        ),
    ],
    ids=["uv", "uv fails", "uv hangs", "without uv"],
)
def test_packages_come_from_the_index_of_pip(checkout: Checkout, program: str, result: str) -> None:
    ended = checkout.install(program, *(["--uv-limit-s=1"] if "sleep" in program else []))
    assert (ended.returncode, ended.stderr) == (0, "")
    line = re.sub(r"[\d.]+ (?=MB|s w)", "", ended.stdout)
    assert line == f"a test in environment: {result}\n"
    assert checkout.greet() == "hello\n"
    # Where the index is stays in the configuration of pip.
    written = [path for path in checkout.folder.rglob("*") if path.is_file()]
    address = checkout.address.encode()
    assert [path.name for path in written if address in path.read_bytes()] == ["pip.conf"]


@pytest.mark.skipif(UV is None, reason="uv is missing: make .venv/.dev")
def test_file_with_another_hash_is_refused(checkout: Checkout) -> None:
    checkout.lock("0" * 64)
    ended = checkout.install(REAL)
    assert ended.returncode == 1
    reason = "a downloaded file does not match its hash in the lock file; nothing was installed"
    assert ended.stdout == f"a test in environment: uv failed ({reason}); failed\n"
    assert ended.stderr == f"error: {reason}\n"
    assert checkout.greet() == ""
