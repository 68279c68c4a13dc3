"""Export of the network as an ONNX graph; the same weights produce the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .serving import FloatArray

INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"
OPSET, IR_VERSION = 17, 8


class Layer(NamedTuple):
    """A convolution [outputs, inputs, 3, 3] or a dense layer [outputs, inputs], with its bias."""

    weight: FloatArray
    bias: FloatArray


def write(layers: list[Layer], path: Path) -> None:
    """Write three convolutions, the last two followed by pooling, and two dense layers."""
    first, second, third, dense, scores = layers
    nodes = [
        *_convolution("conv1", INPUT),
        *_convolution("conv2", "conv1.out"),
        _pool("conv2.out", "pool2"),
        *_convolution("conv3", "pool2"),
        _pool("conv3.out", "pool3"),
        helper.make_node("Flatten", ["pool3"], ["flat"], axis=1),
        _dense("dense", "flat", "dense.sum"),
        helper.make_node("Relu", ["dense.sum"], ["dense.out"]),
        _dense("scores", "dense.out", OUTPUT),
    ]
    named = {"conv1": first, "conv2": second, "conv3": third, "dense": dense, "scores": scores}
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", 1, 16, 16])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", 10])],
        [tensor for name, layer in named.items() for tensor in _initializers(name, layer)],
    )
    model = helper.make_model(
        graph,
        producer_name="triton-gateway",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _initializers(name: str, layer: Layer) -> list[TensorProto]:
    return [
        numpy_helper.from_array(np.ascontiguousarray(values, dtype=np.float32), f"{name}.{part}")
        for part, values in zip(("weight", "bias"), layer, strict=True)
    ]


def _convolution(name: str, source: str) -> list[onnx.NodeProto]:
    inputs = [source, f"{name}.weight", f"{name}.bias"]
    return [
        helper.make_node("Conv", inputs, [f"{name}.sum"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [f"{name}.sum"], [f"{name}.out"]),
    ]


def _pool(source: str, target: str) -> onnx.NodeProto:
    return helper.make_node("MaxPool", [source], [target], kernel_shape=[2, 2], strides=[2, 2])


def _dense(name: str, source: str, target: str) -> onnx.NodeProto:
    return helper.make_node("Gemm", [source, f"{name}.weight", f"{name}.bias"], [target], transB=1)
