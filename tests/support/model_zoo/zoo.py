"""The test repository: many small models, written with whatever names are wanted.

The tests speak of models and tensors by the names below. The repository may hold quite other ones:
nothing in the gateway may know a name.
"""

from __future__ import annotations

import random
import shutil
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

SOURCE = Path(__file__).with_name("model.py")
NUMERIC = [
    "BOOL",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "FP16",
    "FP32",
    "FP64",
]
DATATYPES = (*NUMERIC, "BF16", "BYTES")


@dataclass(frozen=True)
class T:
    """A tensor of a config: its dims are the model's own."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    layout: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    name: str
    behaviour: str
    inputs: tuple[T, ...]
    outputs: tuple[T, ...]
    max_batch_size: int = 0
    hints: Mapping[str, str] = field(default_factory=dict)  # "scale.X": "0..1", by the tests' names
    decoupled: bool = False
    extra: str = ""  # of its config, as it stands there


def identity(name: str, datatype: str, dims: tuple[int, ...], batch: int = 0) -> Model:
    behaviour = "pass_through" if datatype == "BF16" else "identity"
    return Model(name, behaviour, (T("X", datatype, dims),), (T("Y", datatype, dims),), batch)


def image(
    name: str,
    dims: tuple[int, ...],
    batch: int = 8,
    datatype: str = "FP32",
    layout: str = "",
    **hints: str,
) -> Model:
    """Answers what it got as FP32, and with a batch dimension of Triton's each image's mean."""
    given = (T("X", datatype, dims, layout=layout),)
    hinted = {f"{kind}.X": value for kind, value in hints.items()}
    return Model(
        name, "means", given, (T("MEAN", "FP32", (1,)), T("Y", "FP32", dims)), batch, hinted
    )


LABELS = ("cat", "dog", "a bird: any")

MODELS = (
    *(identity(f"batched_{d}", d, (-1, -1), 8) for d in DATATYPES),
    *(identity(f"plain_{d}", d, (-1, -1)) for d in DATATYPES),
    identity("single_BYTES", "BYTES", (1,), 8),
    identity("single_INT32", "INT32", (1,), 8),
    identity("plain_single_BYTES", "BYTES", (1,)),
    identity("vector_FP32", "FP32", (-1,), 8),
    identity("plain_vector_FP32", "FP32", (-1,)),
    identity("large_FP32", "FP32", (3, 224, 224), 8),
    Model(
        "pair", "arithmetic",
        (T("A", "INT32", (2,)), T("B", "INT32", (2,))),
        (T("SUM", "INT32", (2,)), T("PRODUCT", "INT32", (2,))),
        8,
    ),
    Model(
        "optional", "scaled",
        (T("X", "FP32", (-1,)), T("FACTOR", "FP32", (1,), True), T("OFFSET", "FP32", (1,), True)),
        (T("Y", "FP32", (-1,)),),
        8,
    ),
    image("nchw", (3, 6, 4), layout="FORMAT_NCHW"),
    image("nchw_guessed", (3, 6, 4)),
    image("nhwc", (6, 4, 3), layout="FORMAT_NHWC"),
    image("nhwc_free", (-1, -1, 3), datatype="UINT8"),
    image("nchw_free", (3, -1, -1), datatype="UINT8"),
    image("grey_nchw", (1, -1, -1)),
    image("rgba", (-1, -1, 4), datatype="UINT8"),
    image("half", (3, 6, 4), datatype="FP16"),
    image("signed", (3, 6, 4), datatype="INT8"),
    image("unit", (3, 6, 4), scale="0..1"),
    image("centred", (6, 4, 3), scale="-1..1"),
    image("standard", (3, 6, 4), scale="0..1", mean="0.485,0.456,0.406", std="0.229,0.224,0.225"),
    Model("grey_plain", "identity", (T("X", "UINT8", (-1, -1)),), (T("Y", "UINT8", (-1, -1)),)),
    Model("own_batch", "identity", (T("X", "FP32", (1, 3, -1, -1)),), (T("Y", "FP32", (1, 3, -1, -1)),)),
    Model("free_batch", "identity", (T("X", "UINT8", (-1, -1, -1, 3)),), (T("Y", "UINT8", (-1, -1, -1, 3)),)),
    # Files as they are, as for a decoder on a GPU.
    identity("file_UINT8", "UINT8", (-1,), 8),
    identity("file_INT8", "INT8", (-1,), 8),
    Model("file_lengths", "widths", (T("X", "UINT8", (-1,)),), (T("Y", "INT64", (1,)),), 8),
    identity("file_of_4_UINT8", "UINT8", (4,), 8),
    identity("plain_file_UINT8", "UINT8", (-1,)),
    # Images of 16 bits, and shapes that are none of images.
    *(identity(f"grey_{d}", d, (-1, -1), 8) for d in ("UINT16", "INT16", "INT32", "FP32", "UINT8")),
    identity("colours_UINT16", "UINT16", (-1, -1, 3), 8),
    replace(identity("grey_unit", "FP32", (-1, -1), 8), hints={"scale.X": "0..1"}),
    identity("channels_5", "FP32", (5, -1, -1), 8),
    identity("channels_5_last", "FP32", (-1, -1, 5), 8),
    identity("channels_2", "FP32", (2, -1, -1), 8),
    identity("channels_any", "UINT8", (-1, -1, -1), 8),
    identity("frames", "FP32", (16, 3, 8, 8), 8),
    image("nhwc_any", (-1, -1, -1), datatype="UINT8", layout="FORMAT_NHWC"),
    # Batches that cannot be split.
    Model("boxes", "two_rows_per_item", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 4),
    Model("unsplit", "identity", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 4, {"split": "false"}),
    Model(
        "person", "identity",
        (T("AGE", "FP32", (1,)), T("JOB", "BYTES", (1,)), T("N", "INT64", (1,)), T("MEMBER", "BOOL", (1,))),
        (T("AGE", "FP32", (1,)), T("JOB", "BYTES", (1,)), T("N", "INT64", (1,)), T("MEMBER", "BOOL", (1,))),
        8,
    ),
    Model(
        "all_optional", "first_given",
        (T("A", "FP32", (1,), True), T("B", "FP32", (1,), True)), (T("Y", "FP32", (1,)),), 8,
    ),
    Model("not_utf8", "not_utf8", (T("X", "BYTES", (1,)),), (T("Y", "BYTES", (1,)),), 8),
    Model(
        "picture", "picture", (T("WIDTH", "INT32", (1,)),), (T("PNG", "BYTES", (1,)),), 8,
        {"content_type.PNG": "image/png"},
    ),
    Model(
        "json", "as_json", (T("X", "BYTES", (1,)),), (T("Y", "BYTES", (1,)),), 8,
        {"content_type.Y": "application/json"},
    ),
    Model(
        "classes", "identity", (T("X", "FP32", (3,)),), (T("SCORES", "FP32", (3,), labels=LABELS),), 8,
    ),
    Model(
        "labelled", "identity", (T("X", "FP32", (3,)),), (T("SCORES", "FP32", (3,), labels=LABELS),), 8,
        {"classification.SCORES": "1"},
    ),
    Model("sleeping", "sleeping", (T("SECONDS", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 8),
    Model("failing", "failing", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 8),
    Model("refusing", "refusing", (T("X", "BYTES", (1,)),), (T("Y", "BYTES", (1,)),), 8),
    Model("not_finite", "not_finite", (T("X", "FP32", (1,)),), (T("Y", "FP32", (4,)),), 8),
)  # fmt: skip

# Apart from the others: it answers several times, which `/infer` refuses.
TICKING = Model(
    "ticking", "ticking",
    (T("COUNT", "INT32", (1,)), T("SECONDS", "FP32", (1,))),
    (T("NUMBER", "INT32", (1,)), T("MADE", "FP64", (1,))),
    decoupled=True,
)  # fmt: skip

# Waits for as long as its input says, or until it is cancelled; only the first says so in its config.
CANCELLABLE = Model(
    "cancellable", "patient", (T("SECONDS", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 4,
    {"cancellable": "true"},
)  # fmt: skip
PATIENT = replace(CANCELLABLE, name="patient", hints={})
TWINS = replace(CANCELLABLE, name="twins", extra="instance_group { count: 2 kind: KIND_CPU }")

# Keeps a count for each sequence, and says in which process it is.
COUNTING = Model(
    "counting", "counting",
    (T("X", "INT32", (1,)),), (T("COUNT", "INT32", (1,)), T("PROCESS", "INT64", (1,))), 4,
    extra="sequence_batching { max_sequence_idle_microseconds: 60000000 "
    "oldest { max_candidate_sequences: 64 } }",
)  # fmt: skip


# Loaded and unloaded by tests; nothing else uses it.
MANAGED = identity("managed", "INT64", (-1, -1))

SCORES = identity("scores", "FP32", (3,), 8)

# Texts to vectors and to scores.
TEXT = T("TEXT", "BYTES", (1,))
VECTOR = T("VECTOR", "FP32", (4,))
OTHER = T("OTHER", "FP32", (4,))
PAIR_OF_TEXTS = (T("FIRST", "BYTES", (1,)), T("SECOND", "BYTES", (1,)))
TEXT_MODELS = (
    Model(
        "vectors", "vectors", (TEXT,), (VECTOR, OTHER), 8,
        {"embedding.OTHER": "", "embedding_dimensions": "2, 3"},
    ),
    Model("plain_vectors", "vectors", (TEXT,), (VECTOR, OTHER), 0, {"embedding.VECTOR": "yes"}),
    Model("two_vectors", "vectors", (TEXT,), (VECTOR, OTHER), 8),
    Model("token_vectors", "token_vectors", (TEXT,), (T("Y", "FP32", (-1, 4)),), 8),
    Model("relevance", "common_letters", PAIR_OF_TEXTS, (T("SCORE", "FP32", (1,)),), 4),
)  # fmt: skip

# What the shared server of the tests has to load.
SHARED = (*MODELS, *TEXT_MODELS, TICKING, CANCELLABLE, PATIENT, TWINS, MANAGED, SCORES)


class Names:
    """The tests' names and those in the repository; the same, or drawn at random."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._tensors: dict[str, str] = {}  # the tests' names by those in the repository

    def model(self, name: str) -> str:
        return self._name("model", name, "abcXYZ019._-")

    def tensor(self, name: str) -> str:
        drawn = self._name("tensor", name, "abcXYZ019._-:/ é")
        self._tensors[drawn] = name
        return drawn

    def original_tensor(self, drawn: str) -> str:
        return self._tensors.get(drawn, drawn)

    def _name(self, kind: str, name: str, letters: str) -> str:
        """Draw a name, independently of the other names."""
        if self._seed is None:
            return name
        drawing = random.Random(f"{self._seed} {kind} {name}")
        middle = "".join(drawing.choices(letters, k=drawing.randint(3, 12)))
        # A digit or letter at either end: a folder may be no "..", nor end in a blank.
        return f"m{middle}{zlib.crc32(name.encode()) % 10_000}"


AS_WRITTEN = Names()
RENAMED = Names(seed=7)

# For a test that shows that no code knows a name; other tests use the models as written.
any_names = pytest.mark.parametrize(
    "zoo", ["as written", "renamed"], indirect=True, scope="session"
)


def write_repository(folder: Path, names: Names, models: Iterable[Model] = MODELS) -> None:
    for model in models:
        version = folder / names.model(model.name) / "1"
        version.mkdir(parents=True)
        shutil.copy(SOURCE, version)
        (version.parent / "config.pbtxt").write_text(config(model, names))
        for tensor in model.outputs:
            if tensor.labels:
                (version.parent / "labels.txt").write_text("\n".join(tensor.labels))


def config(model: Model, names: Names) -> str:
    parameters = {"behaviour": model.behaviour}
    for hint, value in model.hints.items():
        kind, _, tensor = hint.partition(".")
        parameters[f"gateway.{kind}.{names.tensor(tensor)}" if tensor else f"gateway.{kind}"] = (
            value
        )
    lines = ['backend: "python"', f"max_batch_size: {model.max_batch_size}", model.extra]
    if model.decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += [f"input {{ {entry(tensor, names)} }}" for tensor in model.inputs]
    lines += [f"output {{ {entry(tensor, names)} }}" for tensor in model.outputs]
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    ]
    return "\n".join(lines)


def entry(tensor: T, names: Names) -> str:
    datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    dims = ", ".join(map(str, tensor.dims))
    parts = [f'name: "{names.tensor(tensor.name)}" data_type: TYPE_{datatype} dims: [{dims}]']
    if tensor.optional:
        parts.append("optional: true")
    if tensor.layout:
        parts.append(f"format: {tensor.layout}")
    if tensor.labels:
        parts.append('label_filename: "labels.txt"')
    return " ".join(parts)


class Zoo:
    """A client of the gateway before the test repository, which translates the tests' names.

    A model is loaded when it is used for the first time: all of them take a while to start.
    """

    def __init__(self, client: httpx.Client, names: Names) -> None:
        self.client = client
        self.names = names
        self._loaded: set[str] = set()
        self._lock = threading.Lock()

    def load(self, *models: str) -> None:
        """Load those that are not loaded yet; status 200 says that a model is ready on every replica."""
        with self._lock:
            for model in models:
                if model not in self._loaded:
                    name = quoted(self.names.model(model))
                    response = self.client.post(f"/v2/repository/models/{name}/load")
                    assert response.status_code == 200, response.text
                    self._loaded.add(model)

    def path(self, model: str, verb: str = "/infer") -> str:
        self.load(model)
        return f"/v1/models/{quoted(self.names.model(model))}{verb}"

    def post(self, model: str, verb: str = "/infer", **request: Any) -> httpx.Response:
        return self.client.post(self.path(model, verb), **request)

    def infer(self, model: str, inputs: object, **document: object) -> httpx.Response:
        """JSON, with the names of the inputs translated."""
        return self.post(model, json={"inputs": self.named(inputs), **document})

    def named(self, values: object) -> object:
        """An object by input names, in the repository's names; `{"b64"}` and other values as they are."""
        if not isinstance(values, dict) or values.keys() == {"b64"}:
            return values
        return {self.names.tensor(name): value for name, value in values.items()}

    def outputs(self, response: httpx.Response) -> dict[str, Any]:
        """The outputs of a good answer by the tests' names."""
        assert response.status_code == 200, response.text
        outputs = response.json()["outputs"]
        return {self.names.original_tensor(name): value for name, value in outputs.items()}


def quoted(model: str) -> str:
    """A model's name in a path."""
    return httpx.URL(model).raw_path.decode()
