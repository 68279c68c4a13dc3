"""Writes all-MiniLM-L6-v2 as ONNX: token ids and their mask in, unit vectors out.

The graph is BERT (https://arxiv.org/abs/1810.04805) with the two steps that the model's authors
put behind it, mean pooling and L2 normalisation. Weights are stored as FP16, which halves the file,
and cast back once when the model is loaded: all arithmetic is FP32.
"""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

LAYERS = 6
HEADS = 12
WIDTH = 384
EPSILON = 1e-12

# Opset 20 is the first with Gelu; the IR version is the one that its release of ONNX brought, so
# that a newer onnx package does not write a file that older runtimes refuse.
OPSET = 20
IR_VERSION = 10

Array = np.ndarray[Any, Any]


class Graph:
    """An ONNX graph in the making; each method returns the name of the tensor it adds."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: Array) -> str:
        if name not in self.weights:
            self.weights[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def half(self, name: str, value: Array) -> str:
        return self.op("Cast", self.constant(name, value.astype(np.float16)), to=TensorProto.FLOAT)

    def integers(self, *values: int) -> str:
        return self.constant("int_" + "_".join(map(str, values)), np.array(values, np.int64))

    def number(self, name: str, value: float) -> str:
        return self.constant(name, np.array(value, np.float32))


class Bert:
    """The encoder's layers; `weights` are named as in the published checkpoint."""

    def __init__(self, graph: Graph, weights: dict[str, Array]) -> None:
        self.graph = graph
        self.weights = weights

    def dense(self, x: str, name: str) -> str:
        # The checkpoint keeps its matrices as [out, in]: transposed here once, not on each run.
        matrix = self.graph.half(f"{name}.weight", self.weights[f"{name}.weight"].T)
        bias = self.graph.constant(f"{name}.bias", self.weights[f"{name}.bias"])
        return self.graph.op("Add", self.graph.op("MatMul", x, matrix), bias)

    def layer_norm(self, x: str, name: str) -> str:
        scale = self.graph.constant(f"{name}.weight", self.weights[f"{name}.weight"])
        bias = self.graph.constant(f"{name}.bias", self.weights[f"{name}.bias"])
        return self.graph.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=EPSILON)

    def embeddings(self, input_ids: str) -> str:
        """[batch, seq] -> [batch, seq, WIDTH]; with one sentence, all tokens are of type 0."""
        table = self.weights["embeddings.word_embeddings.weight"].astype(np.float16)
        words = self.graph.op("Gather", self.graph.constant("words", table), input_ids)
        places = self.weights["embeddings.position_embeddings.weight"]
        places = places + self.weights["embeddings.token_type_embeddings.weight"][0]
        length = self.graph.op("Shape", input_ids, start=1, end=2)
        positions = self.graph.op(
            "Slice",
            self.graph.half("positions", places),
            self.graph.integers(0),
            length,
            self.graph.integers(0),
        )
        x = self.graph.op("Add", self.graph.op("Cast", words, to=TensorProto.FLOAT), positions)
        return self.layer_norm(x, "embeddings.LayerNorm")

    def heads(self, x: str, name: str, order: list[int]) -> str:
        split = self.graph.integers(0, 0, HEADS, WIDTH // HEADS)
        x = self.graph.op("Reshape", self.dense(x, name), split)
        return self.graph.op("Transpose", x, perm=order)

    def attention(self, x: str, bias: str, name: str) -> str:
        query = self.heads(x, f"{name}.self.query", [0, 2, 1, 3])
        key = self.heads(x, f"{name}.self.key", [0, 2, 3, 1])
        value = self.heads(x, f"{name}.self.value", [0, 2, 1, 3])
        scale = self.graph.number("scale", math.sqrt(WIDTH // HEADS))
        scores = self.graph.op("Div", self.graph.op("MatMul", query, key), scale)
        shares = self.graph.op("Softmax", self.graph.op("Add", scores, bias), axis=-1)
        mixed = self.graph.op("MatMul", shares, value)
        mixed = self.graph.op("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = self.graph.op("Reshape", mixed, self.graph.integers(0, 0, WIDTH))
        residual = self.graph.op("Add", self.dense(joined, f"{name}.output.dense"), x)
        return self.layer_norm(residual, f"{name}.output.LayerNorm")

    def layer(self, x: str, bias: str, name: str) -> str:
        x = self.attention(x, bias, f"{name}.attention")
        wide = self.graph.op("Gelu", self.dense(x, f"{name}.intermediate.dense"))
        residual = self.graph.op("Add", self.dense(wide, f"{name}.output.dense"), x)
        return self.layer_norm(residual, f"{name}.output.LayerNorm")


def attention_bias(graph: Graph, mask: str) -> str:
    """[batch, seq] of 1 and 0 -> [batch, 1, 1, seq] of 0 and a number that softmax turns into 0."""
    mask = graph.op("Unsqueeze", mask, graph.integers(1, 2))
    padding = graph.op("Sub", graph.number("one", 1.0), mask)
    return graph.op("Mul", padding, graph.number("lowest", float(np.finfo(np.float32).min)))


def pooled(graph: Graph, x: str, mask: str) -> str:
    """The sum over the real tokens, at length 1: the mean's divisor would cancel.

    Spelled out because onnxruntime has no CUDA kernel for LpNormalization.
    """
    total = graph.op("MatMul", graph.op("Unsqueeze", mask, graph.integers(1)), x)
    total = graph.op("Squeeze", total, graph.integers(1))
    length = graph.op("ReduceL2", total, graph.integers(-1), keepdims=1)
    return graph.op("Div", total, graph.op("Max", length, graph.number("tiny", EPSILON)))


def sentence_model(weights: dict[str, Array]) -> onnx.ModelProto:
    """Two INT64 [batch, seq], token ids and their mask, to one FP32 [batch, WIDTH]."""
    graph = Graph()
    bert = Bert(graph, weights)
    mask = graph.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    bias = attention_bias(graph, mask)
    x = bert.embeddings("input_ids")
    for index in range(LAYERS):
        x = bert.layer(x, bias, f"encoder.layer.{index}")
    graph.op("Identity", pooled(graph, x, mask))
    graph.nodes[-1].output[0] = "sentence_embedding"
    return as_model(graph)


def as_model(graph: Graph) -> onnx.ModelProto:
    tokens = ["batch", "seq"]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, tokens)
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info(
        "sentence_embedding", TensorProto.FLOAT, ["batch", WIDTH]
    )
    model = helper.make_model(
        helper.make_graph(
            graph.nodes, "all-MiniLM-L6-v2", inputs, [output], list(graph.weights.values())
        ),
        producer_name="triton-gateway",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    source = "sentence-transformers/all-MiniLM-L6-v2"
    helper.set_model_props(model, {"source": source, "license": "Apache-2.0"})
    onnx.checker.check_model(model, full_check=True)
    return model


def main(weights: Path, target: Path) -> None:
    model = sentence_model(load_file(weights))
    target.write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
