"""Export of torchvision's ResNet-50 as a model repository.

    python -m models.export_resnet50 --output DIR

`make resnet50` creates an environment for it; torch, torchvision and onnxscript are sufficient.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import onnx
import torch
from torchvision.models import ResNet, ResNet50_Weights, resnet50

from models.classifier import Recipe, write

INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"
# The oldest opset that the exporter writes without conversion, for old servers.
OPSET = 18
UNTRAINED = "none"
# torch.load raises all of these for files in another format.
DAMAGE = (
    pickle.UnpicklingError,
    struct.error,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ExportError(Exception):
    """The network cannot be exported; the message gives the reason."""


class Source(NamedTuple):
    """A network, and the published weights that define its preprocessing."""

    network: ResNet
    weights: ResNet50_Weights


def main() -> int:
    options = arguments()
    try:
        network, weights = source(options.weights)
        size, recipe = crop(weights)
        print("exporting the ONNX graph", flush=True)
        graph = exported(network, size)
        write(options.output, graph, weights.meta["categories"], recipe)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output} is ready: triton-gateway up --model-repository {options.output}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.export_resnet50")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the new model repository"
    )
    parser.add_argument(
        "--weights",
        default="DEFAULT",
        help=f"{', '.join(ResNet50_Weights.__members__)} from torchvision (98 MB, downloaded once), "
        f"a weights file, or {UNTRAINED} for random weights (default: DEFAULT)",
    )
    return parser.parse_args()


def source(chosen: str) -> Source:
    torch.manual_seed(0)  # random weights are reproducible
    network = resnet50(weights=None).eval()
    weights = published(chosen)
    if chosen == UNTRAINED:
        return Source(network, weights)
    state = fetched(weights) if chosen in ResNet50_Weights.__members__ else read(Path(chosen))
    try:
        network.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError):
        raise ExportError(f"{chosen} does not hold the weights of a ResNet-50") from None
    return Source(network, weights)


def published(chosen: str) -> ResNet50_Weights:
    """Return the published weights with this name or file name, or the default."""
    for name, weights in ResNet50_Weights.__members__.items():
        if chosen == name or weights.url.endswith(f"/{Path(chosen).name}"):
            return weights
    return ResNet50_Weights.DEFAULT


def fetched(weights: ResNet50_Weights) -> dict[str, torch.Tensor]:
    # The file name contains the expected hash.
    try:
        return dict(weights.get_state_dict(progress=sys.stdout.isatty(), check_hash=True))
    except (OSError, RuntimeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ExportError(f"cannot download the weights: {reason}") from None


def read(path: Path) -> dict[str, torch.Tensor]:
    try:
        check_hash(path)
        # `weights_only` rejects pickles that execute code.
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from None
    except DAMAGE:
        raise ExportError(f"{path} is not a weights file") from None


def check_hash(path: Path) -> None:
    # torch adds the start of the SHA-256 to the name, e.g. resnet50-11ad3fa6.pth.
    match = re.search(r"-([0-9a-f]{8,})\.pth$", path.name)
    if match and not hashlib.sha256(path.read_bytes()).hexdigest().startswith(match[1]):
        raise ExportError(f"{path} is damaged: its SHA-256 does not begin with {match[1]}")


def crop(weights: ResNet50_Weights) -> tuple[int, Recipe]:
    transform = weights.transforms()
    (size,), (resize,) = transform.crop_size, transform.resize_size
    return size, Recipe(resize, size, transform.mean, transform.std)


def exported(network: torch.nn.Module, size: int) -> bytes:
    program = torch.onnx.export(
        network,
        (torch.zeros(2, 3, size, size),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # it is None only if a file name is given
    model = bare(program.model_proto)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    # The metadata contains local paths and the PyTorch build, so the bytes would differ.
    model.ClearField("producer_version")
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in (model, graph, *graph.node, *values):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


if __name__ == "__main__":
    sys.exit(main())
