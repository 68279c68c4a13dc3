"""gRPC calls to a host that does not exist."""

from __future__ import annotations

import pytest

from gateway.triton.grpc.byte_channel import INFER_METHOD, GrpcByteChannel, send_bytes
from gateway.triton.grpc.errors import GrpcUnreachable
from gateway.triton.grpc.management import build_load_request, call_management_api
from gateway.triton.request_target import RequestTarget
from tests.support.wait import TIMEOUT_S

NOBODY = "nobody.invalid:8001"  # RFC 6761, section 6.4


async def test_calls_to_an_unknown_host_raise_unreachable() -> None:
    target = RequestTarget("m", timeout_s=TIMEOUT_S)
    with pytest.raises(GrpcUnreachable):
        await send_bytes(GrpcByteChannel(NOBODY, None), target, INFER_METHOD, b"", ())
    with pytest.raises(GrpcUnreachable):
        await call_management_api(NOBODY, build_load_request("m", {}), TIMEOUT_S)
