"""torchvision's ResNet-50 as a model repository: `python -m models.export_resnet50 --output DIR`.

`make resnet50` does it in an environment of its own. Any other with torch, torchvision and
onnxscript will do: this is all that the export needs.
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
# The oldest that the exporter writes without converting: old servers read it, too.
OPSET = 18
UNTRAINED = "none"
# What torch.load raises for a file that is none of its own.
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
    """The network can't be had; the text is one sentence for whoever called."""


class Source(NamedTuple):
    """A network, ready to answer, and the published weights whose pictures it expects."""

    network: ResNet
    weights: ResNet50_Weights


def main() -> int:
    options = arguments()
    try:
        network, weights = source(options.weights)
        size, recipe = crop(weights)
        print("writing the ONNX graph", flush=True)
        graph = exported(network, size)
        write(options.output, graph, weights.meta["categories"], recipe)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output} is ready: triton-gateway up --model-repository {options.output}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.export_resnet50")
    parser.add_argument("--output", type=Path, required=True, help="the repository's folder")
    parser.add_argument(
        "--weights",
        default="DEFAULT",
        help=f"{', '.join(ResNet50_Weights.__members__)} of torchvision (98 MB, fetched once), "
        f"a file of weights, or {UNTRAINED}: a network that knows nothing (default: DEFAULT)",
    )
    return parser.parse_args()


def source(chosen: str) -> Source:
    """The network with the weights that were chosen."""
    torch.manual_seed(0)  # without weights, too, the same network every time
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
    """The weights of this name or with this file's name; the default's for any other."""
    for name, weights in ResNet50_Weights.__members__.items():
        if chosen == name or weights.url.endswith(f"/{Path(chosen).name}"):
            return weights
    return ResNet50_Weights.DEFAULT


def fetched(weights: ResNet50_Weights) -> dict[str, torch.Tensor]:
    """From torchvision's cache or its site; the file's name holds the hash that it must have."""
    try:
        return dict(weights.get_state_dict(progress=sys.stdout.isatty(), check_hash=True))
    except (OSError, RuntimeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ExportError(f"the weights could not be fetched: {reason}") from None


def read(path: Path) -> dict[str, torch.Tensor]:
    """Tensors and nothing else: a pickle that would run code is refused."""
    try:
        check_hash(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
    except DAMAGE:
        raise ExportError(f"{path} is no file of weights") from None


def check_hash(path: Path) -> None:
    """Of a name such as resnet50-11ad3fa6.pth, as torch writes them."""
    named = re.search(r"-([0-9a-f]{8,})\.pth$", path.name)
    if named and not hashlib.sha256(path.read_bytes()).hexdigest().startswith(named[1]):
        raise ExportError(f"{path} is damaged: its SHA-256 does not begin with {named[1]}")


def crop(weights: ResNet50_Weights) -> tuple[int, Recipe]:
    transform = weights.transforms()
    (size,), (resize,) = transform.crop_size, transform.resize_size
    return size, Recipe(resize, size, transform.mean, transform.std)


def exported(network: torch.nn.Module, size: int) -> bytes:
    """The same weights give the same bytes, wherever they are exported."""
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
    assert program is not None  # it is only when a file name is given
    model = bare(program.model_proto)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without the exporter's notes, which tell paths of this machine and the build of PyTorch."""
    model.ClearField("producer_version")
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in (model, graph, *graph.node, *values):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


if __name__ == "__main__":
    sys.exit(main())
