"""The data of events from gRPC: the documents that the same requests and responses have over HTTP.

They are those of the Open Inference Protocol with its binary tensor data extension, as Triton's clients send
them over HTTP. So every value is kept, and a request can be sent again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2
from tritonclient.utils import TRITON_RESERVED_REQUEST_PARAMS_PREFIX

from gateway.capabilities.samples.events import (
    CONTENT_TYPE,
    CONTENT_TYPE_HEADER,
    JSON_LENGTH,
    REDACTED,
    SampleEvent,
)
from gateway.http_client.connection import Buffer, Headers
from gateway.media_types import OCTET_STREAM
from gateway.tensors.dtypes import DATATYPES
from gateway.triton.grpc.byte_channel import GRPC_SERVICE
from gateway.triton.inference import BinaryInput

PROTOBUF: Final = "application/x-protobuf; messageType=inference."
REQUEST_MESSAGE: Final = "ModelInferRequest"
# Elements that are converted at a time, while Python's global lock is held.
PIECE_ELEMENTS: Final = 4096
# The errors of converting a message: one that Triton refused can have any content.
UNREADABLE: Final = (DecodeError, KeyError, OverflowError, TypeError, ValueError)


def build_message_headers(message_name: str) -> Headers:
    return [(CONTENT_TYPE_HEADER, f"{PROTOBUF}{message_name}".encode())]


def is_message(event: SampleEvent) -> bool:
    """Return whether the data is a gRPC message, which a request over HTTP could only claim to have."""
    is_grpc = str(event.attributes["path"]).startswith(GRPC_SERVICE)
    return is_grpc and str(event.attributes.get(CONTENT_TYPE)).startswith(PROTOBUF)


def convert_message(event: SampleEvent, names: frozenset[str]) -> SampleEvent:
    """Return an event with a document in place of its message, without the values of these tensors.

    The messages of a stream follow each other, which is for protobuf one message with the tensors of all.
    """
    if "datalength" in event.attributes:
        return event.without_data() if names else event
    name = str(event.attributes[CONTENT_TYPE]).removeprefix(PROTOBUF)
    try:
        message = getattr(service_pb2, name).FromString(event.data)
        message = getattr(message, "infer_response", message)
        side = "input" if name == REQUEST_MESSAGE else "output"
        tensors = getattr(message, f"{side}s")
        raw_contents = list(getattr(message, f"raw_{side}_contents"))
        contents = raw_contents or list(map(encode_contents, tensors))
    except UNREADABLE:
        return event.without_data()
    attributes = {**event.attributes, CONTENT_TYPE: OCTET_STREAM}
    document = describe_message(message)
    document[f"{side}s"] = []
    data = []
    for tensor, content in zip(tensors, contents):  # noqa: B905 - Triton refuses other numbers of contents
        described = {
            **describe_message_tensor(tensor),
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
        }
        if tensor.name in names:
            described["data"] = None
            attributes |= REDACTED
        else:
            described["parameters"]["binary_data_size"] = len(content)
            data.append(content)
        document[f"{side}s"].append(described)
    head = orjson.dumps(document)
    attributes[JSON_LENGTH] = str(len(head))
    return SampleEvent(attributes, b"".join((head, *data)))


def describe_message(message: Any) -> dict[str, Any]:
    """Return the document of a message, without its tensors."""
    document: dict[str, Any] = {"id": message.id, "parameters": decode_message_parameters(message)}
    if isinstance(message, service_pb2.ModelInferResponse):
        document["model_name"] = message.model_name
        document["model_version"] = message.model_version
    elif message.outputs:
        # Over gRPC, all outputs are binary.
        document["outputs"] = [
            describe_message_tensor(output, binary_data=True) for output in message.outputs
        ]
    else:
        document["parameters"]["binary_data_output"] = True
    return document


def describe_message_tensor(tensor: Any, **parameters: Any) -> dict[str, Any]:
    return {"name": tensor.name, "parameters": {**decode_message_parameters(tensor), **parameters}}


def decode_message_parameters(message: Any) -> dict[str, Any]:
    """Return the parameters of a message or a tensor, without those that exist over gRPC only."""
    return {
        name: getattr(value, choice)
        for name, value in message.parameters.items()
        if (choice := value.WhichOneof("parameter_choice"))
        and not name.startswith(TRITON_RESERVED_REQUEST_PARAMS_PREFIX)
    }


def encode_contents(tensor: Any) -> bytes:
    """Return the values of a tensor that has them as numbers or texts. Raises one of `UNREADABLE`."""
    dtype = DATATYPES[tensor.datatype].numpy_dtype
    pieces: list[Buffer] = []
    for _, values in tensor.contents.ListFields():
        for start in range(0, len(values), PIECE_ELEMENTS):
            array = np.array(values[start : start + PIECE_ELEMENTS], dtype)
            pieces += BinaryInput(tensor.name, array, tensor.datatype).buffers
    return b"".join(pieces)
