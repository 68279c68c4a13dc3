"""What gRPC says when it reaches nobody."""

from __future__ import annotations

import asyncio

import pytest

from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.byte_channel import INFER_METHOD, GrpcByteChannel
from gateway.triton.grpc.errors import GrpcUnreachable
from gateway.triton.grpc.management import build_load_request, call_management_api
from gateway.triton.grpc.unary import send_bytes
from tests.support.wait import TIMEOUT_S

NOBODY = "nobody.invalid:8001"  # RFC 6761, section 6.4


def test_a_name_that_stands_for_nothing_is_not_reached() -> None:
    async def infer() -> None:
        target = RequestTarget("m", timeout_s=TIMEOUT_S)
        await send_bytes(GrpcByteChannel(NOBODY, None), target, INFER_METHOD, b"", ())

    with pytest.raises(GrpcUnreachable):
        asyncio.run(infer())
    with pytest.raises(GrpcUnreachable):
        asyncio.run(call_management_api(NOBODY, build_load_request("m", {}), TIMEOUT_S))
