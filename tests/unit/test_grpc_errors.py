"""What gRPC says when it reaches nobody."""

from __future__ import annotations

import asyncio

import pytest

from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.channel import GrpcChannel
from gateway.triton.grpc.management import GrpcUnreachable, load_model_via_grpc
from gateway.triton.grpc.unary import infer_unary
from tests.support.wait import TIMEOUT_S

NOBODY = "nobody.invalid:8001"  # RFC 6761, section 6.4


def test_a_name_that_stands_for_nothing_is_not_reached() -> None:
    async def infer() -> None:
        target = RequestTarget("m", timeout_s=TIMEOUT_S)
        await infer_unary(GrpcChannel(NOBODY, None), target, {"model_name": "m", "inputs": []}, [])

    with pytest.raises(GrpcUnreachable):
        asyncio.run(infer())
    with pytest.raises(GrpcUnreachable):
        asyncio.run(load_model_via_grpc(NOBODY, "m", {}, TIMEOUT_S, None))
