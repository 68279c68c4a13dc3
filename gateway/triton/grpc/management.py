"""A replica's management API over gRPC, because a load over Triton's HTTP stalls all inference.

Each call has its own channel: Triton's shutdown waits for open ones, and loads are rare.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

import grpc
import orjson
from tritonclient.grpc import service_pb2

from gateway.errors import DeadlinePassed, MalformedRequest
from gateway.triton.error_mapping import MAX_METADATA_BYTES, map_load_error
from gateway.triton.grpc.byte_channel import (
    GRPC_SERVICE,
    HTTP_STATUS_BY_GRPC_CODE,
    NO_RESPONSE,
    ByteClient,
    GrpcTlsFiles,
    GrpcUnreachable,
    Metadata,
    encode_triton_error,
)

LIVE_METHOD: Final = f"{GRPC_SERVICE}/ServerLive"
# The verb and the method of each request.
MANAGEMENT_METHODS: Final = {
    service_pb2.RepositoryModelLoadRequest: ("load", f"{GRPC_SERVICE}/RepositoryModelLoad"),
    service_pb2.RepositoryModelUnloadRequest: ("unload", f"{GRPC_SERVICE}/RepositoryModelUnload"),
}
UNREACHABLE_MESSAGE: Final = re.compile(
    r"failed to connect|errors resolving |connection (?:refused|reset|closed|attempt timed out)|"
    r"socket closed|recvmsg|endpoint read failed|name resolution|dns resolution|tls handshake|handshak",
    re.I,
)
FILE_PARAMETER_PREFIX: Final = "file:"


def build_load_request(model: str, parameters: Mapping[str, Any]) -> Any:
    """Return the parameter of a load. Raises `MalformedRequest` for a file that is not valid base64."""
    message = service_pb2.RepositoryModelLoadRequest(model_name=model)
    config = parameters.get("config")
    if config is not None:
        text = config if isinstance(config, str) else orjson.dumps(config).decode()
        message.parameters["config"].string_param = text
    for name, content in parameters.items():
        if name.startswith(FILE_PARAMETER_PREFIX):
            try:
                data = base64.b64decode(str(content), validate=True)
            except (binascii.Error, ValueError):
                raise MalformedRequest(f"the content of {name!r} is not valid base64") from None
            message.parameters[name].bytes_param = data
    return message


def build_unload_request(model: str, parameters: Mapping[str, Any]) -> Any:
    message = service_pb2.RepositoryModelUnloadRequest(model_name=model)
    unload_dependents = bool(parameters.get("unload_dependents"))
    message.parameters["unload_dependents"].bool_param = unload_dependents
    return message


async def call_management_api(
    address: str,
    message: Any,
    timeout_s: float,
    tls: GrpcTlsFiles | None = None,
    metadata: Metadata = (),
) -> None:
    """Load or unload a model. Triton responds when it is loaded, but before it is unloaded.

    Raises `GrpcUnreachable`, `DeadlinePassed` or Triton's error.
    """
    verb, method = MANAGEMENT_METHODS[type(message)]
    client = ByteClient(address, tls, MAX_METADATA_BYTES)
    try:
        await client.probe(LIVE_METHOD)
        await client.start_call(method, message.SerializeToString(), timeout_s, metadata)
    except grpc.aio.AioRpcError as exc:
        code = exc.code().name
        details = str(exc.details())
        if code == "DEADLINE_EXCEEDED":
            raise DeadlinePassed(timeout_s) from exc
        if code == "UNAVAILABLE" and UNREACHABLE_MESSAGE.search(details):
            raise GrpcUnreachable(NO_RESPONSE) from exc
        status = HTTP_STATUS_BY_GRPC_CODE.get(code, 400)
        error = encode_triton_error(details)
        raise map_load_error(status, error, message.model_name, verb) from exc
    finally:
        await client.close()
