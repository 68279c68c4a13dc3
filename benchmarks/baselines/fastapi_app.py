"""The baseline without a gateway: one FastAPI route per kind of input, with tritonclient.http.aio.

Each of the three handlers works for one model only, while the gateway works for any.
"""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI, Request, Response
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # The client must be created in the event loop that uses it.
    async with InferenceServerClient(os.environ["TRITON"], conn_limit=64) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


async def infer(model: str, array: np.ndarray, datatype: str) -> np.ndarray:
    tensor = InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)
    result = await app.state.client.infer(model, [tensor])
    return result.as_numpy("Y")


@app.post("/small")
async def small(request: Request) -> Response:
    """Take and return 1 KB of FP32."""
    array = np.frombuffer(await request.body(), np.float32).reshape(1, -1)
    return Response((await infer("small", array, "FP32")).tobytes())


@app.post("/blob")
async def blob(request: Request) -> dict[str, int]:
    """Take a file as BYTES."""
    array = np.array([[await request.body()]], object)
    return {"length": int((await infer("blob", array, "BYTES"))[0, 0])}


@app.post("/array")
async def array(request: Request) -> dict[str, float]:
    """Take an array in NumPy's file format."""
    values = np.load(io.BytesIO(await request.body()))
    return {"mean": float((await infer("array", values[None], "FP32"))[0, 0])}
