"""The floor of Python over gRPC: a grpc.aio server that forwards every call as bytes and checks nothing.

The argument is its port; `TRITON_GRPC` is the address of the upstream server.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc
import uvloop

INFER = "/inference.GRPCInferenceService/ModelInfer"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, channel: grpc.aio.Channel) -> None:
        call = channel.unary_unary(INFER)

        async def forward(message: bytes, _: Any) -> Any:
            return await call(message)

        self._handler = grpc.unary_unary_rpc_method_handler(forward)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handler if details.method == INFER else None


async def serve(port: int, upstream: str) -> None:
    async with grpc.aio.insecure_channel(upstream, UNLIMITED) as channel:
        server = grpc.aio.server(options=UNLIMITED)
        server.add_generic_rpc_handlers((Forwarder(channel),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(int(sys.argv[1]), os.environ["TRITON_GRPC"]))
