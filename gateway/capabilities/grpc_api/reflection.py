"""The standard server reflection, grpc.reflection.v1 and v1alpha, whose messages are the same.

It lets tools such as grpcurl call the methods without Triton's proto files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor_pool import DescriptorPool
from tritonclient.grpc import service_pb2

from gateway.capabilities.grpc_api.call import IncomingCall, NoRequest
from gateway.capabilities.grpc_api.health import HEALTH_SERVICE
from gateway.capabilities.grpc_api.wire import (
    LENGTH_DELIMITED,
    encode_field,
    encode_number,
    iterate_fields,
)
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

REFLECTION_VERSIONS: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
SERVICES: Final = (GRPC_SERVICE.removeprefix("/"), HEALTH_SERVICE)
# Fields of ServerReflectionRequest.
FILE_BY_FILENAME = 3
FILE_CONTAINING_SYMBOL = 4
LIST_SERVICES = 7
# Fields of ServerReflectionResponse.
ORIGINAL_REQUEST = 2
FILE_DESCRIPTORS = 4
SERVICE_LIST = 6
ERROR = 7
MAX_REFLECTION_BYTES: Final = 4 << 10
# Fields of files, messages and services that contain the descriptions of what has a name (descriptor.proto).
MEMBER_FIELDS: Final = (
    "message_type", "nested_type", "enum_type", "service", "field", "oneof_decl", "method",
)  # fmt: skip
# grpc/health/v1/health.proto
HEALTH_FILE: Final = """
name: "grpc/health/v1/health.proto" package: "grpc.health.v1" syntax: "proto3"
message_type { name: "HealthCheckRequest"
  field { name: "service" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "HealthCheckResponse"
  field { name: "status" number: 1 type: TYPE_ENUM label: LABEL_OPTIONAL
    type_name: ".grpc.health.v1.HealthCheckResponse.ServingStatus" }
  enum_type { name: "ServingStatus"
    value { name: "UNKNOWN" number: 0 } value { name: "SERVING" number: 1 }
    value { name: "NOT_SERVING" number: 2 } value { name: "SERVICE_UNKNOWN" number: 3 } } }
service { name: "Health"
  method { name: "Check" input_type: ".grpc.health.v1.HealthCheckRequest"
    output_type: ".grpc.health.v1.HealthCheckResponse" }
  method { name: "Watch" input_type: ".grpc.health.v1.HealthCheckRequest"
    output_type: ".grpc.health.v1.HealthCheckResponse" server_streaming: true } }
"""


class ReflectionService:
    """Describes the services of the gateway."""

    def __init__(self) -> None:
        self._pool = DescriptorPool()
        health_file = text_format.Parse(HEALTH_FILE, descriptor_pb2.FileDescriptorProto())
        self._files: dict[str, str] = {}  # symbol → file
        for file in (*list_files(service_pb2.DESCRIPTOR), health_file):
            self._pool.Add(file)
            self._files.update(dict.fromkeys(list_symbols(file, file.package), file.name))

    async def serve(self, call: IncomingCall) -> None:
        with suppress(NoRequest):  # the end of the stream
            while True:
                message = await call.read_short_message(MAX_REFLECTION_BYTES)
                response = self.build_response(message)
                await call.write(response)
                call.succeed(response)
        call.succeed(b"")

    def build_response(self, message: bytes) -> bytes:
        """Return the response to one request. Raises `MalformedRequest`."""
        original = encode_field(ORIGINAL_REQUEST, message)
        for field in iterate_fields(message, 0, len(message)):
            if field.wire_type != LENGTH_DELIMITED:
                continue
            name = message[field.value_start : field.end].decode(errors="replace")
            if field.number == LIST_SERVICES:
                names = (encode_field(1, encode_field(1, each.encode())) for each in SERVICES)
                return original + encode_field(SERVICE_LIST, b"".join(names))
            if field.number in (FILE_BY_FILENAME, FILE_CONTAINING_SYMBOL):
                return original + self._describe_file(field.number, name)
        return original + encode_error(grpc.StatusCode.UNIMPLEMENTED, "not supported")

    def _describe_file(self, kind: int, name: str) -> bytes:
        file_name = name if kind == FILE_BY_FILENAME else self._files.get(name, "")
        try:
            file = self._pool.FindFileByName(file_name)
        except KeyError:
            return encode_error(grpc.StatusCode.NOT_FOUND, "unknown file or symbol")
        contents = (encode_field(1, each.SerializeToString()) for each in list_files(file))
        return encode_field(FILE_DESCRIPTORS, b"".join(contents))


def list_files(descriptor: Any) -> Iterator[descriptor_pb2.FileDescriptorProto]:
    """Yield the descriptions of the files that a file imports, and then its own."""
    for dependency in descriptor.dependencies:
        yield from list_files(dependency)
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    yield file


def list_symbols(description: Any, scope: str) -> Iterator[str]:
    """Yield the full names of everything that a file, message or service describes."""
    for kind in MEMBER_FIELDS:
        for member in getattr(description, kind, ()):
            name = f"{scope}.{member.name}"
            yield name
            yield from list_symbols(member, name)
            # The values of an enum have the same scope as the enum.
            yield from (f"{scope}.{value.name}" for value in getattr(member, "value", ()))


def encode_error(code: grpc.StatusCode, message: str) -> bytes:
    number: int = code.value[0]
    error = encode_number(1, number) + encode_field(2, message.encode())
    return encode_field(ERROR, error)
