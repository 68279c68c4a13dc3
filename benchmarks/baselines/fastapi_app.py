"""The baseline without a gateway: one FastAPI route per kind of input, with Triton's asyncio clients.

Each handler works for one model only, while the gateway works for any. It validates nothing that FastAPI,
Pillow or NumPy do not.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from fastapi import Body, FastAPI, File, Request, Response, UploadFile
from fastapi.responses import StreamingResponse
from PIL import Image, ImageOps
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient

SIDE = 224


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # The clients must be created in the event loop that uses them.
    async with (
        InferenceServerClient(os.environ["TRITON"], conn_limit=64) as client,
        tritonclient.grpc.aio.InferenceServerClient(os.environ["TRITON_GRPC"]) as grpc_client,
    ):
        app.state.client, app.state.grpc_client = client, grpc_client
        yield


app = FastAPI(lifespan=lifespan)


async def infer(model: str, array: np.ndarray, datatype: str) -> np.ndarray:
    tensor = InferInput("X", list(array.shape), datatype).set_data_from_numpy(array)
    result = await app.state.client.infer(model, [tensor])
    return cast(np.ndarray, result.as_numpy("Y"))


def decode_image(data: bytes) -> np.ndarray:
    """Return an image as FP32 [3, 224, 224], with values from 0 to 255."""
    image: Image.Image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    array: np.ndarray = np.asarray(image, np.float32).transpose(2, 0, 1)
    return array


@app.post("/small")
async def small(request: Request) -> Response:
    """Take and return 1 KB of FP32."""
    array = np.frombuffer(await request.body(), np.float32).reshape(1, -1)
    return Response((await infer("small", array, "FP32")).tobytes())


@app.post("/blob")
async def blob(request: Request) -> dict[str, int]:
    """Take a text or a file as BYTES."""
    array = np.array([[await request.body()]], object)
    return {"Y": int((await infer("blob", array, "BYTES"))[0, 0])}


@app.post("/blob-grpc")
async def blob_over_grpc(request: Request) -> dict[str, int]:
    """Take a text as BYTES, and call Triton over gRPC, so that the call could be cancelled."""
    array = np.array([[await request.body()]], object)
    tensor = tritonclient.grpc.InferInput("X", list(array.shape), "BYTES")
    inputs = [tensor.set_data_from_numpy(array)]
    result = await app.state.grpc_client.infer("blob", inputs)
    return {"Y": int(result.as_numpy("Y")[0, 0])}


@app.post("/blobs")
async def blobs(files: Annotated[list[UploadFile], File(alias="X")]) -> dict[str, Any]:
    """Take the files of a form as a batch of BYTES."""
    array = np.array([[await file.read()] for file in files], object)
    return {"Y": (await infer("blob", array, "BYTES"))[:, 0].tolist()}


@app.post("/array")
async def array(request: Request) -> dict[str, float]:
    """Take an array in NumPy's file format."""
    values = np.load(io.BytesIO(await request.body()))
    return {"Y": float((await infer("array", values[None], "FP32"))[0, 0])}


@app.post("/image")
async def image(request: Request) -> dict[str, float]:
    """Take an image as FP32."""
    values = decode_image(await request.body())
    return {"Y": float((await infer("array", values[None], "FP32"))[0, 0])}


@app.post("/images")
async def images(files: Annotated[list[UploadFile], File(alias="X")]) -> dict[str, Any]:
    """Take the images of a form as a batch of FP32."""
    batch = np.stack([decode_image(await file.read()) for file in files])
    return {"Y": (await infer("array", batch, "FP32"))[:, 0].tolist()}


@app.post("/events")
async def events(
    count: Annotated[int, Body()],
    model: Annotated[str, Body()] = "ticking",
    seconds: Annotated[float, Body()] = 0.0,
) -> StreamingResponse:
    """Return an event for each response of a decoupled model."""
    inputs = [
        tritonclient.grpc.InferInput(name, [1], datatype).set_data_from_numpy(np.array([value]))
        for name, datatype, value in (
            ("COUNT", "INT32", np.int32(count)),
            ("SECONDS", "FP32", np.float32(seconds)),
        )
    ]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    async def encode_events() -> AsyncIterator[str]:
        async for result, error in app.state.grpc_client.stream_infer(requests()):
            if error is not None:
                raise error
            document = {name: result.as_numpy(name).tolist() for name in ("NUMBER", "MADE")}
            yield f"data: {json.dumps(document)}\n\n"

    return StreamingResponse(encode_events(), media_type="text/event-stream")
