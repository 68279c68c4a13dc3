"""Images of the unchanged Dockerfile without an image registry, and containers of them without a cluster.

The bases are made of Debian's packages and get the names that the Dockerfile's FROMs use.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.embedded.installation import cache_folder
from tests.project.container_bases import DISTROLESS_CONFIG, make_distroless, make_python
from tests.support.missing import APT, format_reason
from tests.support.servers import ROOT

TOOLS = ("buildah", "podman", "runc", "debootstrap", "catatonit")
# A package index behind an authority, or a configuration, of this machine's own.
OF_THIS_MACHINE = ("/etc/ssl/certs", "/etc/pip.conf")
CONFIGURATION = """[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=8192:8192"]
"""


def require_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(format_reason(", ".join(missing), f"{APT}{' '.join(TOOLS)}"))
    if os.getuid() != 0:
        pytest.skip("a base is made and images are built as root")


def without_downloads(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.startswith(("./var/cache/apt/", "./var/lib/apt/lists/")) else member


class Engine:
    """buildah and podman with a storage of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # More than the machine's own limit cannot be had, and is what podman asks for.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        (folder / "containers.conf").write_text(CONFIGURATION.format(files=files))
        self.env = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }
        for driver in ("overlay", "vfs"):
            (folder / "storage.conf").write_text(
                f'[storage]\ndriver = "{driver}"\n'
                f'runroot = "{folder}/run-{driver}"\ngraphroot = "{folder}/images-{driver}"\n'
            )
            if self.does("podman", "info"):
                return
        pytest.skip("podman can use neither overlay nor vfs for its storage here")

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command, and return its output; fail with its error message."""
        run = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-4000:]}{run.stderr[-4000:]}"
        return run.stdout.strip()

    def does(self, *command: str) -> bool:
        return subprocess.run(command, env=self.env, capture_output=True).returncode == 0

    def _make_bases(self) -> None:
        """Images of the names that the Dockerfile begins with."""
        dockerfile = (ROOT / "Dockerfile").read_text()
        names = dict(re.findall(r"^ARG (PYTHON|GATEWAY)_IMAGE=(\S+)$", dockerfile, re.M))
        if all(self.does("podman", "image", "exists", name) for name in names.values()):
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as work:
            python = Path(work) / "python"
            distroless = Path(work) / "distroless"
            make_python(python, self.run)
            make_distroless(distroless, python, self.run)
            self._import(python, names["PYTHON"])
            self._import(distroless, names["GATEWAY"], *DISTROLESS_CONFIG)

    def _import(self, root: Path, name: str, *changes: str) -> None:
        archive = root.with_suffix(".tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(root, ".", filter=without_downloads)
        options = [f"--change={change}" for change in changes]
        self.run("podman", "import", "--quiet", *options, str(archive), name, timeout_s=300)

    def build(self, target: str, *options: str, tag: str = "test") -> str:
        self._make_bases()
        image = f"localhost/triton-gateway-{target}:{tag}"
        mounts = [f"--volume={path}:{path}:ro" for path in OF_THIS_MACHINE if Path(path).exists()]
        how = (
            "--isolation=chroot",
            "--network=host",
            "--pull-never",
            "--format=docker",
            "--layers",
        )
        names = (f"--target={target}", f"--tag={image}")
        command = ("buildah", "bud", *how, *mounts, *options, *names, ".")
        self.run(*command, timeout_s=1800)
        return image

    @contextmanager
    def container(self, image: str, options: Sequence[str], *arguments: str) -> Iterator[Container]:
        """Run a container as the manifests do: with a read-only root and no capabilities."""
        confined = (
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--tmpfs=/tmp:rw,size=256m",
            "--network=host",
            "--no-healthcheck",  # whose timer podman wants of systemd
        )
        name = self.run("podman", "run", "--detach", *confined, *options, image, *arguments)
        try:
            yield Container(self, name)
        finally:
            self.run("podman", "rm", "--force", "--time=1", name)

    @contextmanager
    def pods(self, manifest: Path) -> Iterator[None]:
        """Run the pods of Deployments and ConfigMaps, in the network of this machine."""
        play = ("podman", "play", "kube")
        self.run(*play, "--network=host", str(manifest))
        try:
            yield
        finally:
            self.run(*play, "--down", str(manifest))


@dataclass(frozen=True)
class Container:
    engine: Engine
    name: str

    def look(self, what: str) -> str:
        return self.engine.run("podman", "inspect", self.name, f"--format={what}")

    def inside(self, *command: str) -> bool:
        return self.engine.does("podman", "exec", self.name, *command)

    def says(self, *command: str) -> str:
        return self.engine.run("podman", "exec", self.name, *command)

    def terminate(self) -> None:
        self.engine.run("podman", "kill", "--signal=TERM", self.name)

    def end(self, timeout_s: float) -> int:
        """The exit status, after it has ended by itself."""
        return int(self.engine.run("podman", "wait", self.name, timeout_s=timeout_s))

    def log(self) -> str:
        run = subprocess.run(
            ["podman", "logs", self.name], env=self.engine.env, capture_output=True, text=True
        )
        return run.stdout + run.stderr


def engine() -> Engine:
    require_tools()
    return Engine(cache_folder() / "containers")
