"""The standard server reflection, grpc.reflection.v1 and v1alpha, whose messages are the same.

It lets tools such as grpcurl call the methods without Triton's proto files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from grpc_reflection.v1alpha.reflection import aio
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from gateway.capabilities.grpc_api.call import IncomingCall, NoRequest
from gateway.capabilities.grpc_api.health import HEALTH_SERVICE
from gateway.capabilities.grpc_api.models import decode
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

REFLECTION_VERSIONS: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
SERVICES: Final = (GRPC_SERVICE.removeprefix("/"), HEALTH_SERVICE)
MAX_REFLECTION_BYTES: Final = 4 << 10

servicer: Final = aio.ReflectionServicer(SERVICES)


async def serve_reflection(call: IncomingCall) -> None:
    async for response in servicer.ServerReflectionInfo(read_requests(call), call.context):
        message = response.SerializeToString()
        await call.write(message)
        call.succeed(message)
    call.succeed(b"")


async def read_requests(call: IncomingCall) -> AsyncIterator[Any]:
    """Yield the requests of a call until its end. Raises `MalformedRequest` or `RequestTooSlow`."""
    while True:
        try:
            message = await call.read_short_message(MAX_REFLECTION_BYTES)
        except NoRequest:
            return
        yield decode(ServerReflectionRequest, message)
