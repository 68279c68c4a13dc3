"""Networks to upload, and a repository with the servers that use it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from onnx import TensorProto, helper

from tests.support import network
from tests.support.servers import Command, Triton, gateway

MIB = 1 << 20


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


def pack_zip(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


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
class Place:
    """A repository, two Tritons that read it, and a gateway before them that remembers its state."""

    tritons: list[Triton]
    client: httpx.Client
    command: Command
    settings: dict[str, str]

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

    def versions(self, model: str) -> list[str]:
        found = (self.repository / model).iterdir()
        return sorted(path.name for path in found if path.is_dir())


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
