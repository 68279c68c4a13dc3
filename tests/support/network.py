"""Small ONNX networks of known arithmetic, for tests that need a file and not its knowledge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SIZE = 224
CLASSES = 1000
FIELDS = 7
OPSET = 18
IR_VERSION = 10

Floats = NDArray[np.float32]
Tensor = tuple[str, int, list[Any] | None]  # name, type and shape, of numbers and names


def weights() -> Floats:
    return np.random.default_rng(5).normal(size=(3 * FIELDS * FIELDS, CLASSES)).astype(np.float32)


def scores(picture: Floats) -> Floats:
    """Return the scores [1000] of `classifier` for a picture [3, 224, 224], by where each colour is."""
    side = SIZE // FIELDS
    means = picture.reshape(3, FIELDS, side, FIELDS, side).mean(axis=(2, 4))
    result: Floats = means.ravel() @ weights()
    return result


def classifier() -> bytes:
    """`INPUT__0` FP32 [batch, 3, 224, 224] to `OUTPUT__0` FP32 [batch, 1000], as a ResNet's."""
    side = SIZE // FIELDS
    pool = helper.make_node(
        "AveragePool", ["INPUT__0"], ["means"], kernel_shape=[side] * 2, strides=[side] * 2
    )
    nodes = [
        pool,
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["OUTPUT__0"]),
    ]
    given = ("INPUT__0", TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])
    made = ("OUTPUT__0", TensorProto.FLOAT, ["batch", CLASSES])
    return build_network(nodes, [given], [made], [numpy_helper.from_array(weights(), "weights")])


def texts() -> bytes:
    """Two inputs of texts and numbers, and the same as outputs; nothing can be batched."""
    nodes = [
        helper.make_node("Identity", ["words"], ["same words"]),
        helper.make_node("Identity", ["numbers"], ["same numbers"]),
    ]
    words = (TensorProto.STRING, ["count"])
    numbers = (TensorProto.INT64, [2, "width"])
    return build_network(
        nodes,
        [("words", *words), ("numbers", *numbers)],
        [("same words", *words), ("same numbers", *numbers)],
    )


def build_network(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    constants: Sequence[TensorProto] = (),
    *,
    opsets: Mapping[str, int] | None = None,
    ir_version: int = IR_VERSION,
) -> bytes:
    """Return the ONNX file of a graph, of these opsets by domain."""
    given, made = (
        [helper.make_tensor_value_info(*tensor) for tensor in tensors]
        for tensors in (inputs, outputs)
    )
    model = helper.make_model(
        helper.make_graph(nodes, "network", given, made, constants),
        ir_version=ir_version,
        opset_imports=[helper.make_opsetid(*opset) for opset in (opsets or {"": OPSET}).items()],
    )
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())
