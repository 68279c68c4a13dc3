"""ONNX files (onnx.proto), read without their weights: their structure, and the tensors of their graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.errors import InvalidModelFile, MalformedRequest
from gateway.messages import quote_text
from gateway.protobuf_wire import (
    LENGTH_DELIMITED,
    VARINT,
    FieldSpan,
    RawMessage,
    decode_varint,
    iterate_fields,
)

MAX_TOP_LEVEL_FIELDS: Final = 5_000
# The fields of ModelProto (onnx.proto) by number, with their wire types.
MODEL_FIELDS: Final = {
    1: VARINT,  # ir_version
    2: LENGTH_DELIMITED,  # producer_name
    3: LENGTH_DELIMITED,  # producer_version
    4: LENGTH_DELIMITED,  # domain
    5: VARINT,  # model_version
    6: LENGTH_DELIMITED,  # doc_string
    7: LENGTH_DELIMITED,  # graph
    8: LENGTH_DELIMITED,  # opset_import
    14: LENGTH_DELIMITED,  # metadata_props
    20: LENGTH_DELIMITED,  # training_info
    25: LENGTH_DELIMITED,  # functions
    26: LENGTH_DELIMITED,  # configuration
}
REQUIRED_FIELDS: Final = frozenset((1, 7, 8))
MAX_GRAPH_FIELDS: Final = 300_000
MAX_NAME_BYTES: Final = 4 << 10
DYNAMIC: Final = -1
MAX_DIMENSION: Final = (1 << 63) - 1  # a negative number is a larger one on the wire
MODEL_GRAPH, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_OUTPUT, INITIALIZER_NAME = 7, 5, 11, 12, 8
VALUE_NAME, VALUE_TYPE, TYPE_TENSOR, TENSOR_ELEMENT, TENSOR_SHAPE = 1, 2, 1, 1, 2
SHAPE_DIMENSION, DIMENSION_SIZE = 1, 1
# TensorProto.DataType, and the datatypes of a Triton config.
ELEMENT_TYPES: Final = {
    1: "TYPE_FP32", 2: "TYPE_UINT8", 3: "TYPE_INT8", 4: "TYPE_UINT16", 5: "TYPE_INT16", 6: "TYPE_INT32",
    7: "TYPE_INT64", 8: "TYPE_STRING", 9: "TYPE_BOOL", 10: "TYPE_FP16", 11: "TYPE_FP64",
    12: "TYPE_UINT32", 13: "TYPE_UINT64",
}  # fmt: skip
UNREADABLE: Final = (
    "the inputs and outputs of the ONNX file cannot be read; send a config with the labels"
)


def is_onnx_file(data: RawMessage) -> bool:
    """Return whether the file is a complete `ModelProto` with a graph; its fields are not read."""
    found = set()
    try:
        for count, field in enumerate(iterate_fields(data, 0, len(data))):
            if count == MAX_TOP_LEVEL_FIELDS or MODEL_FIELDS.get(field.number) != field.wire_type:
                return False
            found.add(field.number)
    except MalformedRequest:
        return False
    return found >= REQUIRED_FIELDS


class OnnxTensor(NamedTuple):
    """An input or output; `dims` is None if the file does not contain its shape."""

    name: str
    element_type: int
    dims: tuple[int, ...] | None


class OnnxGraph:
    """Reads fields by position, a bounded number of them. Raises `InvalidModelFile`."""

    def __init__(self, data: RawMessage) -> None:
        self._data = data
        self._remaining_fields = MAX_GRAPH_FIELDS
        self.inputs: list[OnnxTensor] = []
        self.outputs: list[OnnxTensor] = []
        defaults = set()
        for graph in self._walk(FieldSpan(0, LENGTH_DELIMITED, 0, 0, len(data)), MODEL_GRAPH):
            for field in self._walk(graph):
                if field.number == GRAPH_INPUT:
                    self.inputs.append(self._read_tensor(field))
                elif field.number == GRAPH_OUTPUT:
                    self.outputs.append(self._read_tensor(field))
                elif field.number == GRAPH_INITIALIZER:
                    names = self._walk(field, INITIALIZER_NAME)
                    defaults |= {self._read_text(name) for name in names}
        self.inputs = [tensor for tensor in self.inputs if tensor.name not in defaults]

    def _walk(self, message: FieldSpan, number: int = 0) -> Iterator[FieldSpan]:
        """Yield the fields of a message, or those with a number."""
        try:
            for field in iterate_fields(self._data, message.value_start, message.end):
                self._remaining_fields -= 1
                if self._remaining_fields < 0:
                    raise InvalidModelFile(UNREADABLE)
                if number in (0, field.number):
                    yield field
        except MalformedRequest:
            raise InvalidModelFile(UNREADABLE) from None

    def _read_text(self, field: FieldSpan) -> str:
        if field.end - field.value_start > MAX_NAME_BYTES:
            raise InvalidModelFile(UNREADABLE)
        return self._data[field.value_start : field.end].decode(errors="replace")

    def _read_number(self, field: FieldSpan) -> int:
        return decode_varint(self._data, field.value_start)[0] if field.wire_type == VARINT else 0

    def _read_tensor(self, message: FieldSpan) -> OnnxTensor:
        name, element_type, dims = "", 0, None
        for field in self._walk(message):
            if field.number == VALUE_NAME:
                name = self._read_text(field)
            elif field.number == VALUE_TYPE:
                for tensor in self._walk(field, TYPE_TENSOR):
                    for part in self._walk(tensor):
                        if part.number == TENSOR_ELEMENT:
                            element_type = self._read_number(part)
                        elif part.number == TENSOR_SHAPE:
                            dims = self._read_shape(part)
        return OnnxTensor(name, element_type, dims)

    def _read_shape(self, message: FieldSpan) -> tuple[int, ...]:
        dims = []
        for dimension in self._walk(message, SHAPE_DIMENSION):
            sizes = list(map(self._read_number, self._walk(dimension, DIMENSION_SIZE)))
            dims.append(sizes[-1] if sizes and 0 < sizes[-1] <= MAX_DIMENSION else DYNAMIC)
        return tuple(dims)


def generate_label_config(data: RawMessage, label_filename: str) -> bytes:
    """Return a config whose only output has labels; Triton derives the rest from the file.

    Raises `InvalidModelFile` for several outputs.
    """
    graph = OnnxGraph(data)
    if len(graph.outputs) != 1:
        raise InvalidModelFile(
            f"the ONNX file has {len(graph.outputs)} outputs; send a config that "
            "names the output with the labels"
        )
    (output,) = graph.outputs
    datatype = ELEMENT_TYPES.get(output.element_type, "")
    tensors = [*graph.inputs, output]
    if not datatype or any(tensor.dims is None for tensor in tensors):
        raise InvalidModelFile(UNREADABLE)
    # As Triton does: a dynamic first dimension everywhere is that of the batch.
    is_batching = all((tensor.dims or ())[:1] == (DYNAMIC,) for tensor in tensors)
    dims = (output.dims or ())[1:] if is_batching else output.dims or ()
    if not dims:
        raise InvalidModelFile(
            f"the output {quote_text(output.name)} is a single number; it needs no labels"
        )
    config = ModelConfig(backend="onnxruntime")
    config.output.add(
        name=output.name, data_type=datatype, dims=dims, label_filename=label_filename
    )
    text: str = text_format.MessageToString(config)
    return text.encode()
