"""Networks to upload, and a repository with the servers that use it."""

from __future__ import annotations

import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from onnx import TensorProto, helper

from tests.capabilities.uploads.support.s3_server import CREDENTIALS, S3Server
from tests.support import network
from tests.support.servers import Command, Triton, gateway
from tests.support.wait import wait_until

MIB = 1 << 20
HIDDEN = ".triton-gateway-"
PREFIX = "of/tests"
MARKER = ".triton-gateway-repository"


def adding(number: float) -> bytes:
    """A network that answers `X` plus a number as `Y`, FP32 [2]."""
    constant = helper.make_tensor("number", TensorProto.FLOAT, [1], [number])
    return network.build_network(
        [helper.make_node("Add", ["X", "number"], ["Y"])],
        [("X", TensorProto.FLOAT, [2])],
        [("Y", TensorProto.FLOAT, [2])],
        [constant],
    )


FIRST, SECOND = adding(1), adding(2)
# A complete network for ONNX's grammar, which no runtime can run.
UNKNOWN_OPERATOR = FIRST.replace(b"\x03Add", b"\x03Odd")


def pack_zip(files: Mapping[str, str | bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def zipped_versions(versions: Mapping[int, bytes]) -> bytes:
    """An archive of versions, all of which are served."""
    files = {f"{version}/model.onnx": content for version, content in versions.items()}
    return pack_zip({"config.pbtxt": "version_policy { all { } }", **files})


def padded(size: int) -> Iterator[bytes]:
    """A network with a comment of this size, in pieces."""
    yield FIRST
    length, varint = size, b""
    while length >= 0x80:
        varint, length = varint + bytes([length & 0x7F | 0x80]), length >> 7
    yield b"\x32" + varint + bytes([length])
    for start in range(0, size, MIB):
        yield b"x" * min(MIB, size - start)


def listed_states(client: httpx.Client, model: str) -> list[str]:
    """Of a model on each replica, by the list of models, which is an error while no replica answers."""
    models = client.get("/v1/models").json().get("models", [])
    return [
        state for each in models if each["name"] == model for state in each["replicas"].values()
    ]


@dataclass
class Place(ABC):
    """A repository, two Tritons that read it, and a gateway before them that remembers its state."""

    tritons: list[Triton]
    client: httpx.Client
    command: Command
    settings: dict[str, str]

    @abstractmethod
    def files(self, model: str) -> dict[str, bytes]:
        """The files of a model, by their paths."""

    @abstractmethod
    def hidden(self) -> list[str]:
        """The temporary files."""

    @contextmanager
    def another_gateway(self, **settings: str) -> Iterator[tuple[httpx.Client, Command]]:
        urls = [triton.options.url for triton in self.tritons]
        with gateway(*urls, **{**self.settings, **settings}) as found:
            yield found

    def infer(self, model: str, client: httpx.Client | None = None) -> list[float]:
        body = {"inputs": {"X": [1, 2]}}
        answer = (client or self.client).post(f"/v1/models/{model}/infer", json=body)
        assert answer.status_code == 200, answer.text
        values: list[float] = answer.json()["outputs"]["Y"]
        return values


@dataclass
class FolderPlace(Place):
    """A repository in a folder."""

    repository: Path

    def files(self, model: str) -> dict[str, bytes]:
        folder = self.repository / model
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def hidden(self) -> list[str]:
        return [path.name for path in self.repository.rglob(f"{HIDDEN}*")]

    def versions(self, model: str) -> list[str]:
        found = (self.repository / model).iterdir()
        return sorted(path.name for path in found if path.is_dir())


@dataclass
class BucketPlace(Place):
    """A repository below a prefix of a bucket."""

    server: S3Server
    scratch: Path

    def object_keys(self, folder: str = "") -> list[str]:
        return [key for key in self.server.keys(PREFIX) if key.startswith(folder)]

    def read(self, key: str) -> bytes:
        signed = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request"
        }
        return httpx.get(f"{self.server.url}/{PREFIX}/{key}", headers=signed).content

    def files(self, model: str) -> dict[str, bytes]:
        prefix = f"{model}/"
        return {key.removeprefix(prefix): self.read(key) for key in self.object_keys(prefix)}

    def hidden(self) -> list[str]:
        """The temporary objects and files."""
        objects = [key for key in self.object_keys(HIDDEN) if key != MARKER]
        return objects + [path.name for path in self.scratch.glob("triton-gateway-*")]


@contextmanager
def bucket_place(folder: Path) -> Iterator[BucketPlace]:
    scratch = folder / "scratch"
    scratch.mkdir()
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**CREDENTIALS, "TMPDIR": str(scratch)}.items():
            environment.setenv(name, value)
        server = stack.enter_context(S3Server())
        repository = server.repository(PREFIX)
        settings = {
            "repository": repository,
            "model_uploads": "artifacts",
            "state": f"file://{folder}/state.db",
            "poll_interval_s": "2",  # For each index, a Triton asks the S3 server many things.
            "connect_timeout_s": "10",
        }
        tritons = [triton_of(repository) for _ in range(2)]
        urls = [triton.options.url for triton in tritons]
        # The gateway first: a Triton does not start with an empty prefix.
        client, command = stack.enter_context(gateway(*urls, **settings))
        for triton in tritons:
            stack.enter_context(triton)
            triton.wait()
        wait_until(lambda: client.get("/readyz").is_success)
        yield BucketPlace(tritons, client, command, settings, server, scratch)


@contextmanager
def folder_place(folder: Path, **more: str) -> Iterator[FolderPlace]:
    repository = folder / "models"
    repository.mkdir()
    settings = {
        "repository": f"file://{repository}",
        "model_uploads": "artifacts",
        "state": f"file://{folder}/state.db",
        "poll_interval_s": "0.1",
        "connect_timeout_s": "10",
        **more,
    }
    with ExitStack() as stack:
        tritons = [stack.enter_context(triton_of(repository)) for _ in range(2)]
        for triton in tritons:
            triton.wait()
        urls = [triton.options.url for triton in tritons]
        client, command = stack.enter_context(gateway(*urls, **settings))
        yield FolderPlace(tritons, client, command, settings, repository)


def triton_of(repository: Path | str) -> Triton:
    """One that completes configs, of a folder or a bucket."""
    triton = Triton(Path())
    triton.options = replace(triton.options, model_repositories=(repository,), extra_arguments=())
    return triton
