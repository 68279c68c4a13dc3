"""ONNX files, which have no signature: their outer structure, a message `ModelProto`, and their graph.

The inputs and outputs of the graph are read without its weights (onnx.proto).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.messages import quote_text

MAX_TOP_LEVEL_FIELDS: Final = 5_000
MAX_FIELD_HEADER_BYTES: Final = 20  # two varints
# Wire types.
VARINT = 0
LENGTH_DELIMITED = 2
FIXED_BYTES: Final = {1: 8, 5: 4}  # wire type → size of the value
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


@dataclass(frozen=True)
class WireField:
    """A field of a message: its number and type, and its value or the place of its content."""

    number: int
    wire_type: int
    value: int
    start: int
    end: int


def is_onnx_file(file: BinaryIO, size: int) -> bool:
    """Return whether the file is a complete `ModelProto` with a graph; its fields are not read."""
    found = set()
    try:
        for count, field in enumerate(walk_message(file, 0, size)):
            if count == MAX_TOP_LEVEL_FIELDS or MODEL_FIELDS.get(field.number) != field.wire_type:
                return False
            found.add(field.number)
    except ValueError:
        return False
    return found >= REQUIRED_FIELDS


def walk_message(file: BinaryIO, start: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message at this place of a file. Raises `ValueError` if it is malformed."""
    while start < end:
        file.seek(start)
        header = file.read(MAX_FIELD_HEADER_BYTES)
        tag, length = parse_varint(header, 0)
        number = tag >> 3
        wire_type = tag & 7
        value = 0
        if wire_type not in FIXED_BYTES:
            value, length = parse_varint(header, length)
        sizes = {VARINT: 0, LENGTH_DELIMITED: value, **FIXED_BYTES}
        content = start + length
        if wire_type not in sizes or content + sizes[wire_type] > end:
            raise ValueError
        start = content + sizes[wire_type]
        yield WireField(number, wire_type, value, start=content, end=start)


def parse_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the value and the position after it. Raises `ValueError` if it is incomplete."""
    value = 0
    for position in range(start, min(len(data), start + 10)):
        value |= (data[position] & 0x7F) << 7 * (position - start)
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError


# The graph

MAX_GRAPH_FIELDS: Final = 300_000
MAX_NAME_BYTES: Final = 4 << 10
DYNAMIC: Final = -1
MAX_DIMENSION: Final = (1 << 63) - 1  # a negative number is a larger one on the wire
MODEL_GRAPH = 7
GRAPH_INITIALIZER = 5
GRAPH_INPUT = 11
GRAPH_OUTPUT = 12
INITIALIZER_NAME = 8
VALUE_NAME = 1
VALUE_TYPE = 2
TYPE_TENSOR = 1
TENSOR_ELEMENT = 1
TENSOR_SHAPE = 2
SHAPE_DIMENSION = 1
DIMENSION_SIZE = 1
# TensorProto.DataType, and the datatypes of a Triton config.
ELEMENT_TYPES: Final = {
    1: "TYPE_FP32", 2: "TYPE_UINT8", 3: "TYPE_INT8", 4: "TYPE_UINT16", 5: "TYPE_INT16", 6: "TYPE_INT32",
    7: "TYPE_INT64", 8: "TYPE_STRING", 9: "TYPE_BOOL", 10: "TYPE_FP16", 11: "TYPE_FP64",
    12: "TYPE_UINT32", 13: "TYPE_UINT64",
}  # fmt: skip
UNREADABLE: Final = (
    "the inputs and outputs of the ONNX file cannot be read; send a config with the labels"
)


@dataclass(frozen=True)
class OnnxTensor:
    """An input or output; `dims` is None if the file does not contain its shape."""

    name: str
    element_type: int
    dims: tuple[int, ...] | None


class OnnxGraph:
    """Reads fields by position, a bounded number of them. Raises `InvalidModelFile`."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._remaining_fields = MAX_GRAPH_FIELDS
        self.inputs: list[OnnxTensor] = []
        self.outputs: list[OnnxTensor] = []
        defaults = set()
        for graph in self._walk(WireField(0, LENGTH_DELIMITED, 0, start=0, end=size), MODEL_GRAPH):
            for field in self._walk(graph):
                if field.number == GRAPH_INPUT:
                    self.inputs.append(self._read_tensor(field))
                elif field.number == GRAPH_OUTPUT:
                    self.outputs.append(self._read_tensor(field))
                elif field.number == GRAPH_INITIALIZER:
                    names = self._walk(field, INITIALIZER_NAME)
                    defaults |= {self._read_text(name) for name in names}
        self.inputs = [tensor for tensor in self.inputs if tensor.name not in defaults]

    def _walk(self, message: WireField, number: int = 0) -> Iterator[WireField]:
        try:
            for field in walk_message(self._file, message.start, message.end):
                self._remaining_fields -= 1
                if self._remaining_fields < 0:
                    raise InvalidModelFile(UNREADABLE)
                if number in (0, field.number):
                    yield field
        except ValueError:
            raise InvalidModelFile(UNREADABLE) from None

    def _read_text(self, field: WireField) -> str:
        if field.end - field.start > MAX_NAME_BYTES:
            raise InvalidModelFile(UNREADABLE)
        self._file.seek(field.start)
        return self._file.read(field.end - field.start).decode(errors="replace")

    def _read_tensor(self, message: WireField) -> OnnxTensor:
        name = ""
        element_type = 0
        dims = None
        for field in self._walk(message):
            if field.number == VALUE_NAME:
                name = self._read_text(field)
            elif field.number == VALUE_TYPE:
                for tensor in self._walk(field, TYPE_TENSOR):
                    for part in self._walk(tensor):
                        if part.number == TENSOR_ELEMENT:
                            element_type = part.value
                        elif part.number == TENSOR_SHAPE:
                            dims = self._read_shape(part)
        return OnnxTensor(name, element_type, dims)

    def _read_shape(self, message: WireField) -> tuple[int, ...]:
        dims = []
        for dimension in self._walk(message, SHAPE_DIMENSION):
            sizes = [size.value for size in self._walk(dimension, DIMENSION_SIZE)]
            dims.append(sizes[-1] if sizes and 0 < sizes[-1] <= MAX_DIMENSION else DYNAMIC)
        return tuple(dims)


def generate_label_config(file: BinaryIO, size: int, label_filename: str) -> bytes:
    """Return a config whose only output has labels; Triton derives the rest from the file.

    Raises `InvalidModelFile` for several outputs.
    """
    graph = OnnxGraph(file, size)
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
    # As Triton does: if the first dimension is dynamic everywhere, it is the batch.
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
