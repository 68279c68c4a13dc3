"""What one would write without a gateway: a FastAPI route per kind of input, and tritonclient.http.aio.

Three handlers, each a dozen lines, each knowing its model: the work that the gateway does for any.
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
    # The client belongs to the loop that it is made in.
    async with InferenceServerClient(os.environ["TRITON"], conn_limit=64) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


async def asked(model: str, array: np.ndarray, datatype: str) -> np.ndarray:
    tensor = InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)
    result = await app.state.client.infer(model, [tensor])
    return result.as_numpy("Y")


@app.post("/small")
async def small(request: Request) -> Response:
    """1 KB of FP32 in and out."""
    array = np.frombuffer(await request.body(), np.float32).reshape(1, -1)
    return Response((await asked("small", array, "FP32")).tobytes())


@app.post("/blob")
async def blob(request: Request) -> dict[str, int]:
    """A file as BYTES."""
    array = np.array([[await request.body()]], object)
    return {"length": int((await asked("blob", array, "BYTES"))[0, 0])}


@app.post("/array")
async def array(request: Request) -> dict[str, float]:
    """NumPy's own file."""
    values = np.load(io.BytesIO(await request.body()))
    return {"mean": float((await asked("array", values[None], "FP32"))[0, 0])}
