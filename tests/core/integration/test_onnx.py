"""ONNX files on the embedded Triton: every network answers as onnxruntime itself does.

One tritonserver serves them, behind a gateway. Their configs are those of Triton's C++ backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import tritonclient.http as triton_http
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data
from tritonclient.utils import np_to_triton_dtype

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.guards import child_of
from tests.support.model_folders import write_model_folder
from tests.support.network import Tensor, build_network
from tests.support.servers import BriefTriton, gateway_before, triton_with
from tests.support.wait import wait_until

Array = NDArray[Any]

FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
STRING = TensorProto.STRING
DEFAULT_MAX_BATCH_SIZE = 6
ONE_INSTANCE = 'backend: "onnxruntime" instance_group [ { count: 1 } ]\n'
DATATYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
FLOATS = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
WORDS = np.array([["a", "wörd"], ["", "말"]], np.object_)


@dataclass(frozen=True)
class Network:
    """A model: its files by their paths, its config, and a request in the shapes of the graph."""

    name: str
    files: Mapping[str, bytes]
    inputs: Mapping[str, Array]
    config: str = ""
    max_batch_size: int = 0
    dims: Mapping[str, list[int]] = field(default_factory=dict)  # some of the completed ones
    graph: str = "1/model.onnx"  # the file that onnxruntime compares with

    def expected(self, repository: Path) -> dict[str, Array]:
        session = onnxruntime.InferenceSession(repository / self.name / self.graph)
        outputs = session.get_outputs()
        names = [output.name for output in outputs if output.type.startswith("tensor")]
        return dict(zip(names, session.run(names, dict(self.inputs)), strict=True))


def network(name: str, graph: bytes, inputs: Mapping[str, Array], **more: Any) -> Network:
    return Network(name, {"1/model.onnx": graph}, inputs, **more)


def node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def identity(datatype: int, shape: list[Any], **more: Any) -> bytes:
    return build_network(
        [node("Identity", "x", "y")], [("x", datatype, shape)], [("y", datatype, shape)], **more
    )


def scaled(factor: float) -> bytes:
    """`y` = `x` times a factor, FP32 [batch, 4]."""
    constant = numpy_helper.from_array(np.array([factor], np.float32), "factor")
    tensors: list[Tensor] = [("x", FLOAT, ["batch", 4]), ("y", FLOAT, ["batch", 4])]
    return build_network([node("Mul", "x factor", "y")], tensors[:1], tensors[1:], [constant])


def all_datatypes() -> bytes:
    """An input and an output of every datatype, [batch, 2]."""
    return build_network(
        [node("Identity", name, f"same_{name}") for name in DATATYPES],
        [(name, kind, ["batch", 2]) for name, kind in DATATYPES.items()],
        [(f"same_{name}", kind, ["batch", 2]) for name, kind in DATATYPES.items()],
    )


def every_value(datatype: str) -> Array:
    if datatype == "BYTES":
        return WORDS
    values = np.array([[0, 1], [1, 100]])
    return values.astype(helper.tensor_dtype_to_np_dtype(DATATYPES[datatype]))


def scalars() -> bytes:
    return build_network(
        [node("Add", "a b", "sum"), node("Identity", "word", "same")],
        [("a", FLOAT, []), ("b", FLOAT, []), ("word", STRING, [])],
        [("sum", FLOAT, []), ("same", STRING, [])],
    )


def vectors() -> bytes:
    """Tensors whose only dimension is the batch."""
    return build_network(
        [node("Neg", "x", "y")], [("x", INT64, ["batch"])], [("y", INT64, ["batch"])]
    )


def labelled() -> bytes:
    """Texts to numbers by a table, an operator of another domain."""
    encoder = node(
        "LabelEncoder", "words", "numbers", domain="ai.onnx.ml",
        keys_strings=["cat", "dog"], values_int64s=[3, 7], default_int64=-1,
    )  # fmt: skip
    return build_network(
        [encoder],
        [("words", STRING, [1, "count"])],
        [("numbers", INT64, [1, "count"])],
        opsets={"": 17, "ai.onnx.ml": 2},
        ir_version=8,
    )


def with_default() -> bytes:
    """An input with a default value: an initializer that is also an input."""
    return build_network(
        [node("Add", "x offset", "y")],
        [("x", FLOAT, [4]), ("offset", FLOAT, [1])],
        [("y", FLOAT, [4])],
        [numpy_helper.from_array(np.array([10], np.float32), "offset")],
    )


def lookup() -> bytes:
    """`y` = row `x` of a table: an index outside of it fails in the run."""
    table = numpy_helper.from_array(np.arange(40, dtype=np.float32).reshape(10, 4), "table")
    return build_network(
        [node("Gather", "table x", "rows"), node("ReduceSum", "rows one", "y", keepdims=0)],
        [("x", INT64, ["batch", 2])],
        [("y", FLOAT, ["batch", 4])],
        [table, numpy_helper.from_array(np.array([1], np.int64), "one")],
    )


def external_weights() -> tuple[bytes, bytes]:
    """A file and, apart from it, its weights."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = onnx.load_from_string(
        build_network(
            [node("MatMul", "x weights", "y")],
            [("x", FLOAT, ["batch", 4])],
            [("y", FLOAT, ["batch", 3])],
            [numpy_helper.from_array(weights, "weights")],
        )
    )
    (constant,) = model.graph.initializer
    set_external_data(constant, "weights.bin")
    constant.ClearField("raw_data")
    return bytes(model.SerializeToString()), weights.tobytes()


def sequence_step() -> bytes:
    """`y` = `x`, plus 100 at the start of a sequence."""
    hundred = numpy_helper.from_array(np.array([100], np.float32), "hundred")
    return build_network(
        [node("Mul", "START hundred", "more"), node("Add", "x more", "y")],
        [("x", FLOAT, ["batch", 1]), ("START", FLOAT, ["batch", 1])],
        [("y", FLOAT, ["batch", 1])],
        [hundred],
    )


def sequence_output() -> bytes:
    """A tensor and a list of tensors as outputs."""
    graph = helper.make_graph(
        [node("SplitToSequence", "x", "parts"), node("Neg", "x", "y")],
        "network",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 4])],
        [
            helper.make_tensor_sequence_value_info("parts", FLOAT, None),
            helper.make_tensor_value_info("y", FLOAT, ["batch", 4]),
        ],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    return bytes(model.SerializeToString())


GRAPH_FILE, WEIGHTS_FILE = external_weights()
FULL_CONFIG = """
name: "configured"
platform: "onnxruntime_onnx"
default_model_filename: "net.onnx"
max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
optimization {
  graph { level: 1 }
  execution_accelerators {
    gpu_execution_accelerator [ { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ]
    cpu_execution_accelerator [ { name: "openvino" } ]
  }
}
model_warmup [ {
  name: "first" batch_size: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
} ]
parameters { key: "intra_op_thread_count" value { string_value: "5" } }
parameters { key: "inter_op_thread_count" value { string_value: "1" } }
parameters { key: "execution_mode" value { string_value: "0" } }
parameters { key: "enable_mem_arena" value { string_value: "1" } }
parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "cpu:0" } }
"""
SEQUENCE_CONFIG = f"""{ONE_INSTANCE}
max_batch_size: 4
sequence_batching {{ control_input [ {{ name: "START" control [
  {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} ] }} ] }}
"""
OPTIONAL_CONFIG = f"""{ONE_INSTANCE}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }},
        {{ name: "offset" data_type: TYPE_FP32 dims: [ 1 ] optional: true }} ]
"""
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'

NETWORKS = [
    network("bare", scaled(2), {"x": FLOATS}, max_batch_size=6, dims={"x": [4], "y": [4]}),
    network(
        "platform", identity(FLOAT, [-1, 4], opsets={"": 7}, ir_version=3), {"x": FLOATS},
        config='platform: "onnxruntime_onnx" instance_group [ { count: 1 } ]\n' + ONE_THREAD,
        max_batch_size=6, dims={"x": [4]},
    ),
    network(
        "datatypes", all_datatypes(), {name: every_value(name) for name in DATATYPES},
        config=ONE_INSTANCE, max_batch_size=6, dims={"BYTES": [2], "same_FP16": [2]},
    ),
    network(
        "scalars", scalars(),
        {"a": np.array(1.5, np.float32), "b": np.array(2, np.float32), "word": np.array("wörd", np.object_)},
        dims={"a": [1], "word": [1], "sum": [1]},
    ),
    network(
        "vectors", vectors(), {"x": np.arange(4)}, config=ONE_INSTANCE, max_batch_size=6,
        dims={"x": [1], "y": [1]},
    ),
    network(
        "labelled", labelled(), {"words": np.array([["dog", "cow", "cat"]], np.object_)},
        config=ONE_INSTANCE, dims={"words": [1, -1], "numbers": [1, -1]},
    ),
    network(
        "tensor_only", sequence_output(), {"x": FLOATS},
        config=ONE_INSTANCE + 'output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]', max_batch_size=6,
    ),
    network("optional", with_default(), {"x": FLOATS[0]}, config=OPTIONAL_CONFIG, dims={"y": [4]}),
    network(
        "lookup", lookup(), {"x": np.array([[1, 2], [0, 9]])}, config=f"{ONE_INSTANCE}max_batch_size: 64",
        max_batch_size=64,
    ),
    Network(
        "weights", {"1/model.onnx/model.onnx": GRAPH_FILE, "1/model.onnx/weights.bin": WEIGHTS_FILE},
        {"x": FLOATS}, ONE_INSTANCE, 6, graph="1/model.onnx/model.onnx",
    ),
    Network(
        "versions", {"1/model.onnx": scaled(2), "3/model.onnx": scaled(3)}, {"x": FLOATS},
        f"{ONE_INSTANCE}version_policy {{ all {{ }} }}", 6, graph="3/model.onnx",
    ),
    Network(
        "configured", {"1/net.onnx": scaled(5), "labels.txt": b"a\nb\nc\nd\n"}, {"x": FLOATS}, FULL_CONFIG,
        16, graph="1/net.onnx",
    ),
    network(
        "sequence", sequence_step(), {"x": FLOATS[:1, :1], "START": np.zeros((1, 1), np.float32)},
        config=SEQUENCE_CONFIG, max_batch_size=4, dims={"x": [1]},
    ),
]  # fmt: skip
SEQUENCE = NETWORKS[-1]


def from_the_future() -> bytes:
    model = onnx.load_from_string(identity(FLOAT, ["n"]))
    model.ir_version = 99
    return bytes(model.SerializeToString())


BACKEND = 'backend: "onnxruntime"\n'
DECLARED = "max_batch_size: 4 input [ { name: %s } ] output [ { name: %s } ]"
X = '"x" data_type: TYPE_FP32 dims: [ 4 ]'
Y = '"y" data_type: TYPE_FP32 dims: [ 4 ]'
Z = Y.replace('"y"', '"z"')
GRAPH = scaled(2)


@dataclass(frozen=True)
class Wrong:
    """A model that cannot be served: its files, its config, and the sentence with which its load fails."""

    name: str
    files: Mapping[str, bytes]
    sentence: str
    config: str = ""


def wrong(name: str, graph: bytes, sentence: str, config: str = "") -> Wrong:
    return Wrong(name, {"1/model.onnx": graph}, sentence, BACKEND + config if config else "")


NOT_A_MODEL = "model.onnx is not an ONNX file, "
NO_SUPPORT = "which the onnxruntime backend of the embedded Triton does not support; "
WRONG = [
    wrong("text", b"this is not a model", f"{NOT_A_MODEL}or it is incomplete"),
    wrong("cut", GRAPH[:-9], f"{NOT_A_MODEL}or it is incomplete"),
    wrong("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
          f"{NOT_A_MODEL}a pointer of Git LFS: run `git lfs pull`"),
    wrong("empty", b"", "cannot load model.onnx: No graph was found in the protobuf"),
    wrong("newer", from_the_future(), "cannot load model.onnx: Unsupported model IR version: 99"),
    wrong("weightless", GRAPH_FILE, 'External data path does not exist: "weights.bin"'),
    wrong("bfloat", identity(TensorProto.BFLOAT16, ["n"]),
          f"the input x is a tensor(bfloat16), {NO_SUPPORT}export the model with FP16 or FP32 in its place"),
    wrong("list", sequence_output(),
          f"the output parts is a seq(tensor(float)), {NO_SUPPORT}declare only the tensors in config.pbtxt, "
          "or export the model without it"),
    wrong("unbatched", identity(FLOAT, [2, 4]),
          "max_batch_size is 8, but the ONNX graph cannot batch: the first dimension of an input or output "
          "is fixed; set max_batch_size to 0, or export it as dynamic",
          "max_batch_size: 8"),
    wrong("type", GRAPH, "the input x is TYPE_INT8 in the config, but tensor(float) in the ONNX graph",
          DECLARED % (X.replace("FP32", "INT8"), Y)),
    wrong("shape", GRAPH,
          "the output y has the shape [-1, 7] including the batch dimension in the config, but [-1, 4] in "
          "the ONNX graph",
          DECLARED % (X, Y.replace("4", "7"))),
    wrong("other", GRAPH, "the ONNX graph has no output z; it has y", DECLARED % (X, Z)),
    wrong("missing", scalars(), "the ONNX graph requires the input b, which the config does not declare",
          'input [ { name: "a" data_type: TYPE_FP32 dims: [ 1 ] } ]'),
    wrong("threads", GRAPH, "intra_op_thread_count must be a number from 0, not 'many'",
          'parameters { key: "intra_op_thread_count" value { string_value: "many" } }'),
    wrong("ragged", GRAPH,
          "the onnxruntime backend of the embedded Triton does not support ragged batches "
          "(allow_ragged_batch, batch_input, batch_output); serve this model with the official Triton image",
          DECLARED % (X + " allow_ragged_batch: true", Y)),
    wrong("operators", GRAPH, "the operator library missing.so cannot be loaded: ",
          'model_operations { op_library_filename: "missing.so" }'),
    Wrong("absent", {"1/other.onnx": GRAPH}, "model.onnx not found in the folder of version 1", BACKEND),
    Wrong("torch", {"1/model.pt": b"PK"},
          "the embedded Triton has no pytorch backend; export the model to ONNX with torch.onnx.export, or "
          "serve the model with the official Triton image"),
    Wrong("aot", {"1/model.pt2": b"PK"}, "the embedded Triton has no pytorch backend; export the model to",
          'backend: "pytorch" default_model_filename: "model.pt2"'),
]  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    models: list[Network | Wrong] = [*NETWORKS, *WRONG]
    for model in models:
        write_model_folder(folder / model.name, model.config, model.files)
    return folder


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[EmbeddedTriton]:
    """A tritonserver without a model: each test loads what it uses."""
    options = replace(
        triton_with((repository,), arguments=["--model-load-thread-count=12"]).options,
        backend_configs=(f"onnxruntime,default-max-batch-size={DEFAULT_MAX_BATCH_SIZE}",),
    )
    with BriefTriton(options) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url) as client:
        yield client


@pytest.fixture(scope="module")
def client(triton: EmbeddedTriton) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(triton.options.address, concurrency=16) as made:
        yield made


def infer(
    client: triton_http.InferenceServerClient, model: str, inputs: Mapping[str, Array], **more: Any
) -> triton_http.InferResult:
    tensors = []
    for name, values in inputs.items():
        tensor = triton_http.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
        tensors.append(tensor.set_data_from_numpy(values))
    return client.infer(model, tensors, **more)


def shape_for_triton(values: Array, is_batching: bool) -> Array:
    """Triton's shape of a scalar, and of an item without dimensions, is [1]."""
    return values.reshape(*values.shape, 1) if values.ndim == is_batching else values


def load(server: httpx.URL | str, *names: str) -> list[httpx.Response]:
    """Load models at the same time: most of what Triton takes for one is waiting."""
    urls = [f"{str(server).rstrip('/')}/v2/repository/models/{name}/load" for name in names]
    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(lambda url: httpx.post(url, timeout=600), urls))


def check_config(config: Mapping[str, Any], network: Network) -> None:
    is_sequence = network is SEQUENCE
    assert config["backend"] == "onnxruntime"
    assert config["max_batch_size"] == network.max_batch_size
    assert ("dynamic_batching" in config) == (network.max_batch_size > 1 and not is_sequence)
    tensors = {tensor["name"]: tensor["dims"] for tensor in [*config["input"], *config["output"]]}
    assert {name: list(map(int, tensors[name])) for name in network.dims} == network.dims
    assert not is_sequence or "START" not in tensors


@pytest.mark.parametrize(
    "networks",
    [
        pytest.param(NETWORKS[:2], id="two"),
        pytest.param(NETWORKS, id="all", marks=pytest.mark.long),
    ],
)
def test_networks_are_completed_and_answer_as_onnxruntime(
    repository: Path,
    triton: EmbeddedTriton,
    client: triton_http.InferenceServerClient,
    networks: list[Network],
    subtests: pytest.Subtests,
) -> None:
    loads = load(f"http://{triton.options.address}", *(network.name for network in networks))
    for network, loaded in zip(networks, loads, strict=True):
        with subtests.test(network.name):
            assert loaded.status_code == 200, loaded.text
            check_config(client.get_model_config(network.name), network)
            if network is SEQUENCE:
                continue
            is_batching = network.max_batch_size > 0
            inputs = {
                name: shape_for_triton(np.asarray(values), is_batching)
                for name, values in network.inputs.items()
            }
            result = infer(client, network.name, inputs)
            for name, expected in network.expected(repository).items():
                values = result.as_numpy(name)
                assert values.shape == shape_for_triton(np.asarray(expected), is_batching).shape
                if values.dtype == np.object_:
                    assert [text.decode() for text in values.ravel()] == np.ravel(expected).tolist()
                else:
                    assert values.dtype == expected.dtype
                    np.testing.assert_allclose(values.ravel(), np.ravel(expected), rtol=1e-6)


@pytest.mark.long
def test_version_runs_its_own_file(
    gateway: httpx.Client, client: triton_http.InferenceServerClient
) -> None:
    load(gateway.base_url, "versions")
    for version, factor in (("1", 2), ("3", 3), ("", 3)):
        result = infer(client, "versions", {"x": FLOATS}, model_version=version)
        np.testing.assert_array_equal(result.as_numpy("y"), FLOATS * np.float32(factor))


def test_optional_input_replaces_its_default(
    gateway: httpx.Client, client: triton_http.InferenceServerClient
) -> None:
    load(gateway.base_url, "optional")
    result = infer(client, "optional", {"x": FLOATS[0], "offset": np.array([1], np.float32)})
    np.testing.assert_array_equal(result.as_numpy("y"), FLOATS[0] + np.float32(1))


@pytest.mark.long
def test_sequence_gives_the_graph_its_control_inputs(
    gateway: httpx.Client, client: triton_http.InferenceServerClient
) -> None:
    load(gateway.base_url, "sequence")
    one = np.ones((1, 1), np.float32)
    steps = [
        infer(
            client, "sequence", {"x": one},
            sequence_id=8, sequence_start=number == 0, sequence_end=number == 2,
        ).as_numpy("y").item()
        for number in range(3)
    ]  # fmt: skip
    assert steps == [101, 1, 1]


def test_labels_name_the_best_scores(gateway: httpx.Client) -> None:
    load(gateway.base_url, "configured")
    body = {"inputs": [[1, 9, 3, 7]], "parameters": {"classification": 2}}
    response = gateway.post("/v1/models/configured/infer", json=body)
    assert response.status_code == 200, response.text
    (best,) = response.json()["outputs"]["y"]
    assert [entry["label"] for entry in best] == ["b", "d"]


def count_threads(triton: EmbeddedTriton, instance: str) -> int:
    """The threads of an instance's stub process."""
    children = psutil.Process(child_of(triton.reaper_pid)).children()
    (stub,) = [child for child in children if instance in child.cmdline()]
    return stub.num_threads()


@pytest.mark.long
def test_number_of_threads_is_that_of_the_config(
    triton: EmbeddedTriton, gateway: httpx.Client, client: triton_http.InferenceServerClient
) -> None:
    load(gateway.base_url, "configured", "platform")
    for model in ("configured", "platform"):
        infer(client, model, {"x": FLOATS})
    assert count_threads(triton, "configured_0_0") == count_threads(triton, "platform_0_0") + 4


@pytest.mark.long
def test_concurrent_requests_share_runs_and_fail_alone(
    gateway: httpx.Client, client: triton_http.InferenceServerClient
) -> None:
    load(gateway.base_url, "lookup")
    rows = np.random.default_rng(6).integers(0, 10, (200, 3, 2))
    rows[::20] = 99  # not a row of the table
    table = np.arange(40, dtype=np.float32).reshape(10, 4)

    def post(indices: Array) -> httpx.Response:
        body = {"inputs": {"x": indices.tolist()}}
        return gateway.post("/v1/models/lookup/infer", json=body)

    def count_runs_and_requests() -> tuple[int, int]:
        statistics = client.get_inference_statistics("lookup")["model_stats"][0]
        return statistics["execution_count"], statistics["inference_count"] // 3

    def runs_are_shared() -> bool:
        """Return whether requests shared a run, which they may not on a busy machine."""
        runs_before, requests_before = count_runs_and_requests()
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(post, rows))
        for indices, answer in zip(rows, answers, strict=True):
            if (indices == 99).any():
                assert answer.status_code == 422, answer.text
                assert "idx=99 must be within the inclusive range [-10,9]" in answer.json()["error"]
                assert "Gather" not in answer.text
            else:
                assert answer.json()["outputs"]["y"] == table[indices].sum(axis=1).tolist()
        runs, requests = count_runs_and_requests()
        return runs - runs_before < requests - requests_before

    wait_until(runs_are_shared)


def test_string_that_is_not_utf_8_is_refused(gateway: httpx.Client) -> None:
    load(gateway.base_url, "labelled")
    body = {"inputs": {"words": [[{"b64": "/w=="}]]}}
    response = gateway.post("/v1/models/labelled/infer", json=body)
    assert response.status_code == 422, response.text
    assert response.json()["error"] == "a string in the request is not valid UTF-8"


def test_load_that_fails_is_422_with_the_reason(gateway: httpx.Client) -> None:
    (response,) = load(gateway.base_url, "text")
    assert response.status_code == 422
    sentence = "failed to load 'text': model.onnx is not an ONNX file, or it is incomplete"
    assert response.json()["error"] == sentence


@pytest.mark.long
def test_list_has_the_reason_why_a_model_is_not_served(
    triton: EmbeddedTriton, gateway: httpx.Client, subtests: pytest.Subtests
) -> None:
    def read_reasons() -> dict[str, str]:
        models = gateway.get("/v1/models").json()["models"]
        return {
            model["name"]: str([version.get("reason") for version in model["versions"]])
            for model in models
        }

    load(f"http://{triton.options.address}", *(model.name for model in WRONG))
    names = {model.name for model in WRONG}
    no_reason = ("[]", "[None]")  # unknown, or being loaded
    wait_until(lambda: all(read_reasons().get(name, "[]") not in no_reason for name in names))
    reasons = read_reasons()
    for model in WRONG:
        with subtests.test(model.name):
            assert model.sentence in reasons[model.name]
            for internal in ("model.py", "TritonModelException", "/"):
                assert internal not in reasons[model.name]
