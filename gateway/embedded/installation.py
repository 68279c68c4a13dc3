"""Installation of a tritonserver without Docker: downloaded once, by hash, into the user's cache.

The server's files come from the `nvidia-pytriton` wheel, without its dependencies. The models run in
a separate environment, because this Triton's Python backend does not support NumPy 2, which the
gateway uses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.embedded import backends
from gateway.embedded.python_stub import find_unsafe_characters
from gateway.messages import CommandError, join_names, quote_text

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# Those for which NumPy 1.26 and a stub of the Python backend exist.
MODELS_PYTHON_VERSIONS = ("3.10", "3.11", "3.12")
# What a Python prints of itself.
LIBRARY_FOLDERS = """
import os, sys, sysconfig
libdir, multiarch = sysconfig.get_config_vars("LIBDIR", "MULTIARCH")
folder = libdir or "/usr/lib"
print(folder, os.path.join(folder, multiarch or ""), os.path.join(sys.base_prefix, "lib"), sep=os.linesep)
"""
MIN_GLIBC_VERSION = (2, 35)
DOCKER_HINT = "run Triton in Docker and use: triton-gateway serve"
LIBRARY_PATH = "LD_LIBRARY_PATH"
COMPLETE_MARKER = ".complete"


class CannotInstall(CommandError):
    """The embedded Triton cannot be installed. The message says what to do."""


@dataclass(frozen=True)
class Installation:
    """The paths of an installed tritonserver."""

    server: Path
    libraries: Path
    backends: Path
    models_bin: Path
    libpython: Path

    def environment(self) -> dict[str, str]:
        own = ("PYTHON", "GATEWAY_")
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
        # Some machines find the driver of their GPU by the inherited path only.
        places = (str(self.libpython), str(self.libraries), inherited.get(LIBRARY_PATH, ""))
        return inherited | {
            LIBRARY_PATH: ":".join(filter(None, places)),
            "PATH": f"{self.models_bin}:{os.environ.get('PATH', os.defpath)}",
            "VIRTUAL_ENV": str(self.models_bin.parent),
            "PYTHONUNBUFFERED": "1",
            "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime reports its use to its vendor otherwise
        }


def cache_folder() -> Path:
    setting = os.environ.get("TRITON_GATEWAY_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(setting).expanduser().absolute() if setting else base / "triton-gateway"


def install_triton(on_message: Callable[[str], None]) -> Installation:
    """Download and assemble the missing parts; a complete installation is reused.

    Raises `CannotInstall` if this platform is not supported or a download fails.
    """
    check_platform(platform.system(), platform.machine(), platform.libc_ver())
    python = find_models_python()
    cache = cache_folder()
    check_cache_path(cache)
    models = prepare_models_environment(cache, python, on_message)
    files = fetch_server(cache, python, models, on_message)
    triton = files / "pytriton" / "tritonserver"
    return Installation(
        server=triton / "bin" / "tritonserver",
        libraries=files / "nvidia_pytriton.libs",
        backends=assemble_backends(files, triton, python.version),
        models_bin=models / "bin",
        libpython=python.library,
    )


def check_cache_path(cache: Path) -> None:
    """Check that the Python backend can be started from this path. Raises `CannotInstall`."""
    if unsafe := find_unsafe_characters(cache):
        raise CannotInstall(
            f"the cache folder {quote_text(str(cache), 200)} cannot be used: Triton's Python backend "
            f"does not support paths with {join_names(unsafe)}; "
            "set TRITON_GATEWAY_CACHE to another folder"
        )


def check_platform(system: str, machine: str, libc: tuple[str, str]) -> None:
    """Check that this machine can run the embedded server. Raises `CannotInstall`."""
    if (system, machine) != ("Linux", "x86_64"):
        raise CannotInstall(
            f"the embedded Triton runs on Linux x86-64 only, not on {system} {machine}; {DOCKER_HINT}"
        )
    name, version = libc
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or numbers < MIN_GLIBC_VERSION:
        required = ".".join(map(str, MIN_GLIBC_VERSION))
        raise CannotInstall(
            f"the embedded Triton requires glibc {required} or newer, not {name or 'this libc'} {version}; "
            f"use a newer distribution, or {DOCKER_HINT}"
        )


@dataclass(frozen=True)
class ModelsPython:
    """A Python for the models, and the folder of its shared libpython, which the backend's stub links to."""

    executable: str
    version: str
    library: Path


def find_models_python() -> ModelsPython:
    """Return the gateway's own Python if it suits the models, or the newest one in PATH that does.

    Raises `CannotInstall`.
    """
    is_cpython = platform.python_implementation() == "CPython"
    if is_cpython and PYTHON_VERSION in MODELS_PYTHON_VERSIONS:
        candidates = {PYTHON_VERSION: sys.executable}
    else:
        versions = reversed(MODELS_PYTHON_VERSIONS)
        candidates = {each: path for each in versions if (path := shutil.which(f"python{each}"))}
    error = CannotInstall(
        f"the embedded Triton runs its models with CPython {MODELS_PYTHON_VERSIONS[0]} to "
        f"{MODELS_PYTHON_VERSIONS[-1]}, not with {platform.python_implementation()} {PYTHON_VERSION}, and "
        "PATH has none; install one beside it (uv python install 3.12; Ubuntu 24.04: apt-get install "
        f"python3.12-venv libpython3.12), or {DOCKER_HINT}"
    )
    for version, executable in candidates.items():
        try:
            library = find_libpython(ask_library_folders(executable), version)
            return ModelsPython(executable, version, library)
        except CannotInstall as exc:
            error = exc
    raise error


def ask_library_folders(executable: str) -> list[Path]:
    """Return where a Python can have its shared library; nothing if it does not run, such as a shim."""
    command = [executable, "-I", "-c", LIBRARY_FOLDERS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return [Path(line) for line in run.stdout.splitlines()]


def find_libpython(folders: Iterable[Path], version: str = PYTHON_VERSION) -> Path:
    """Return the folder of the shared libpython. Raises `CannotInstall` if the Python has none."""
    name = f"libpython{version}.so.1.0"
    for folder in folders:
        if (folder / name).exists():
            return folder
    raise CannotInstall(
        f"Triton's Python backend requires {name}, which this Python lacks; install it "
        f"(Debian, Ubuntu: apt-get install libpython{version}; pyenv: build with --enable-shared)"
    )


def find_lock_file(name: str) -> Path:
    # An installed package contains the lock files; a checkout has them at its root.
    package = Path(__file__).parents[1]
    packaged = package / "requirements" / name
    return packaged if packaged.exists() else package.parent / "requirements" / name


def name_models_folder(cache: Path, python_version: str) -> Path:
    return cache / f"models-py{python_version}-{hash_files([find_lock_file('models.txt')])}"


def name_server_folder(cache: Path) -> Path:
    return cache / f"tritonserver-{hash_files([find_lock_file('tritonserver.txt')])}"


def list_missing_parts(python_version: str) -> list[str]:
    cache = cache_folder()
    folders = {
        "tritonserver": name_server_folder(cache),
        "the models' Python environment": name_models_folder(cache, python_version),
    }
    return [name for name, folder in folders.items() if not (folder / COMPLETE_MARKER).exists()]


def prepare_models_environment(
    cache: Path, python: ModelsPython, on_message: Callable[[str], None]
) -> Path:
    lock = find_lock_file("models.txt")
    with build_once(name_models_folder(cache, python.version)) as (folder, needed):
        if needed:
            on_message("installing the models' Python environment, 35 MB (first start only)")
            install_packages(python, folder, lock, on_message)
    return folder


def fetch_server(
    cache: Path, python: ModelsPython, models: Path, on_message: Callable[[str], None]
) -> Path:
    lock = find_lock_file("tritonserver.txt")
    with build_once(name_server_folder(cache)) as (folder, needed):
        if needed:
            on_message("downloading tritonserver, 55 MB (first start only)")
            install_packages(python, models, lock, on_message, "--target", str(folder))
    return folder


def assemble_backends(files: Path, triton: Path, python_version: str) -> Path:
    sources = sorted(backends.FOLDER.glob("*.py"))
    version = hash_files([find_lock_file("tritonserver.txt"), *sources])
    # The backend needs the stub of the models' Python.
    links = {
        "triton_python_backend_utils.py": triton / "backends/python/triton_python_backend_utils.py",
        "triton_python_backend_stub": triton
        / f"python_backend_stubs/{python_version}/triton_python_backend_stub",
    }
    with build_once(files.with_name(f"backends-py{python_version}-{version}")) as (folder, needed):
        if needed:
            python = folder / "python"
            python.mkdir(parents=True)
            for name, source in links.items():
                (python / name).symlink_to(os.path.relpath(source, python))
            # A copy: Triton runs no Python-based backend with a library outside of its folder.
            shutil.copy(triton / "backends/python/libtriton_python.so", python)
            # The folder `python` is in the import path of every stub.
            package = python / backends.PACKAGE_COPY
            package.mkdir()
            for source in sources:
                shutil.copy(source, package)
            for name, backend in backends.PYTHON_BASED_BACKENDS.items():
                (folder / name).mkdir()
                (folder / name / "model.py").write_text(backend.model_source)
    return folder


def install_packages(
    python: ModelsPython,
    environment: Path,
    lock: Path,
    on_message: Callable[[str], None],
    *options: str,
) -> None:
    """Install a lock file into an environment, which is created if it is missing. Raises `CannotInstall`."""
    script = str(find_lock_file("install.py"))
    command = [python.executable, script, *options, lock.stem, str(environment), str(lock)]
    # The Makefile installs uv beside the gateway.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    ended = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["the installation failed"]
        raise CannotInstall(lines[-1].removeprefix("error: "))
    on_message(ended.stdout.strip().partition(": ")[2])  # without the title


@contextmanager
def build_once(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder, and True if the caller must build it; only one process builds at a time."""
    complete = folder / COMPLETE_MARKER
    if complete.exists():
        yield folder, False
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as exc:
        raise CannotInstall(
            f"cannot write to {folder.parent} ({exc.strerror}); "
            "set TRITON_GATEWAY_CACHE to another folder"
        ) from exc
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists():
            yield folder, False
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder, True
            complete.touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def hash_files(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
