"""PyTriton's clients, over HTTP and gRPC, with an access token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from pytriton.client import (
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)

from tests.clients.programs.outcomes import Call, Target, print_outcomes

ROW = np.arange(16, dtype=np.int32)
OPTIONS: dict[str, Any] = {"init_timeout_s": 3, "inference_timeout_s": 30}


def list_calls(target: Target) -> Iterator[Call]:
    warnings.simplefilter("ignore")  # about timeouts that gRPC's client does not have
    options = {**OPTIONS, "access_token": target.key}

    def sample(url: str, model: str, *inputs: Any, **more: Any) -> Any:
        with ModelClient(url, model, **{**options, **more}) as client:
            return client.infer_sample(*inputs)

    def batch(url: str) -> Any:
        with ModelClient(url, "simple", **options) as client:
            rows = np.stack([ROW, ROW])
            return client.infer_batch(INPUT0=rows, INPUT1=rows)

    def config(url: str) -> Any:
        with ModelClient(url, "simple", **options) as client:
            client.wait_for_model(timeout_s=10)
            return repr(client.model_config)

    async def sample_aio(url: str) -> Any:
        async with AsyncioModelClient(url, "simple", **options) as client:
            return await client.infer_sample(ROW, ROW)

    def sample_in_thread(url: str) -> Any:
        with FuturesModelClient(url, "simple", **OPTIONS, access_token=target.key) as client:
            return client.infer_sample(ROW, ROW).result()

    for name, url in (("http", f"http://{target.http}"), ("grpc", f"grpc://{target.grpc}")):
        yield f"{name}: model config", partial(config, url)
        yield f"{name}: infer sample", partial(sample, url, "simple", ROW, ROW)
        yield f"{name}: infer batch", partial(batch, url)
        yield (
            f"{name}: infer BYTES",
            partial(sample, url, "texts", *[ROW.astype(str).astype(bytes)] * 2),
        )
        yield f"{name}: infer wrong shape", partial(sample, url, "simple", ROW[:3], ROW)
        yield (
            f"{name}: infer version 9",
            partial(sample, url, "simple", ROW, ROW, model_version="9", init_timeout_s=1),
        )
        yield f"{name}: infer aio", partial(sample_aio, url)
        yield f"{name}: infer in a thread", partial(sample_in_thread, url)

    def decoupled() -> Any:
        with DecoupledModelClient(f"grpc://{target.grpc}", "ticking", **options) as client:
            count, seconds = np.array([3], np.int32), np.array([0.01], np.float32)
            return [answer["NUMBER"] for answer in client.infer_sample(count, seconds)]

    yield "grpc: decoupled", decoupled


if __name__ == "__main__":
    print_outcomes(list_calls)
