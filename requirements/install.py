"""Install locked packages with uv, or with pip where uv fails, and print one line with its size and time.

    python requirements/install.py [OPTION...] TITLE ENVIRONMENT LOCK...

The environment is created if it is missing. uv comes from PATH, or with --fetch-uv from pip if that is quick.
It uses what pip is configured to use: indexes, links, constraints, certificates. Only the standard library is
imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

FETCH_UV_S = 10
UV_LOCK = Path(__file__).with_name("uv.txt")
# Where pip keeps an option, the last one wins.
SECTIONS = ("global", "install", ":env:")
# The variables that uv reads, and how it separates several values.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
}


class InstallError(Exception):
    """A program failed; the text is its last error."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("title")
    parser.add_argument("environment", type=Path)
    parser.add_argument("locks", nargs="+")
    parser.add_argument("--fetch-uv", action="store_true")
    parser.add_argument("--editable", metavar="PROJECT")
    parser.add_argument("--target", type=Path, metavar="FOLDER")
    parser.add_argument("--uv-limit-s", type=float, default=60)
    arguments = parser.parse_args()
    folder = arguments.target or arguments.environment
    start = time.monotonic()
    print(f"{arguments.title} in {folder}: ", end="", flush=True)
    size = measure(folder)
    try:
        installer = install(arguments)
    except InstallError as error:
        print("failed", flush=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    megabytes = (measure(folder) - size) / 1e6
    print(f"{megabytes:.0f} MB in {time.monotonic() - start:.1f} s with {installer}", flush=True)
    return 0


def install(arguments: argparse.Namespace) -> str:
    """Return the name of the program that installed."""
    python = arguments.environment.absolute() / "bin" / "python"
    if not python.exists():
        # A pip of its own takes longer than all that uv installs.
        without_pip = ["--without-pip"] if has_pip() else []
        run([sys.executable, "-m", "venv", *without_pip, str(arguments.environment)])
    pip = find_pip(python)
    locked = ["--no-deps", *(f"--requirement={lock}" for lock in arguments.locks)]
    if arguments.target:
        # What is imported once from a folder of its own is never built.
        locked += ["--only-binary=:all:", f"--target={arguments.target}"]
    project = ["--no-deps", "--no-build-isolation", f"--editable={arguments.editable}"]
    try:
        uv = shutil.which("uv") or shutil.which(python.with_name("uv"))
        if not uv and arguments.fetch_uv:
            uv = fetch_uv(pip, python)
        if uv:
            environment = configure_uv(pip)
            # With --require-hashes, uv refuses a constraint such as "torch<3"; the lock has all hashes.
            hashes = "--verify-hashes" if "UV_CONSTRAINT" in environment else "--require-hashes"
            command = [uv, "pip", "install", f"--python={python}"]
            deadline = time.monotonic() + arguments.uv_limit_s
            run([*command, hashes, *locked], environment, arguments.uv_limit_s)
            if arguments.editable:
                run([*command, *project], environment, deadline - time.monotonic())
            return "uv"
    except InstallError as error:
        print(f"uv failed ({error}); ", end="", flush=True)
    run([*pip, "install", "--require-hashes", *locked])
    if arguments.editable:
        run([*pip, "install", *project])
    return "pip"


def has_pip() -> bool:
    """Return whether this Python has a pip that can install into another environment."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (22, 3)


def find_pip(python: Path) -> list[str]:
    options = ["--disable-pip-version-check", "--no-input"]
    if python.with_name("pip").exists():
        return [str(python), "-m", "pip", *options]
    return [sys.executable, "-m", "pip", f"--python={python}", *options]


def fetch_uv(pip: list[str], python: Path) -> str:
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--requirement={UV_LOCK}"]
    run([*pip, "install", *options], limit_s=FETCH_UV_S)
    return str(python.with_name("uv"))


def configure_uv(pip: list[str]) -> dict[str, str]:
    """Return an environment in which uv uses what pip is configured to use; what is set for uv stays."""
    configured: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in run([*pip, "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in configured:
            configured[section][option] = ast.literal_eval(value)
    options = {name: value for section in SECTIONS for name, value in configured[section].items()}
    variables = {
        variable: separator.join(options[option].split())
        for option, (variable, separator) in VARIABLES.items()
        if options.get(option)
    }
    # As pip does: the best version of all indexes, each of which is trusted alike.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **variables, **os.environ}


def run(
    command: list[str], environment: dict[str, str] | None = None, limit_s: float | None = None
) -> str:
    try:
        done = subprocess.run(
            command, env=environment, timeout=limit_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"no result after {limit_s:.0f} s") from None
    except OSError as exc:
        raise InstallError(str(exc)) from exc
    if done.returncode:
        reason = find_reason(done.stdout + done.stderr)
        raise InstallError(reason or f"exit status {done.returncode}")
    return done.stdout


def find_reason(output: str) -> str:
    """Return the one line of an error that says what is wrong."""
    if "ensurepip is not available" in output:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return f"python -m venv failed; install it (Debian, Ubuntu: apt-get install {version}-venv)"
    if "HASHES" in output or "Hash mismatch" in output:
        return "a downloaded file does not match its hash in the lock file; nothing was installed"
    if re.search("[Cc]onnection|Name or service|resolution|Network is|ProxyError", output):
        return "the package index cannot be reached; only the first start requires the network"
    if "No matching distribution" in output:
        return (
            "the package index cannot be reached or lacks a locked package; "
            "only the first start requires the network"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ")]
    if errors:
        return errors[-1].partition(": ")[2]
    return lines[-1] if lines else ""


def measure(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    sys.exit(main())
