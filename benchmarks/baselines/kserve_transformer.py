"""The baseline with KServe: a transformer in front of Triton, in KServe's model server.

It accepts KServe's V1 JSON, `{"instances": [[...]]}`, calls Triton through V2 with binary tensors, and
returns `{"predictions": [[...]]}`. It runs in `.venv-peers` with KServe's own arguments.
"""

from __future__ import annotations

import argparse
import logging

import numpy as np
from kserve import InferInput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.logging import configure_logging


class Transformer(Model):
    """A transformer. `predict`, which sends the result of `preprocess` to Triton, is inherited."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def preprocess(
        self, payload: dict[str, list[list[float]]], headers: dict[str, str] | None = None
    ) -> InferRequest:
        array = np.asarray(payload["instances"], np.float32)
        tensor = InferInput("X", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return InferRequest(self.name, [tensor], parameters={"binary_data_output": True})

    async def postprocess(
        self,
        result: InferResponse,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, list[list[float]]]:
        return {"predictions": result.get_output_by_name("Y").as_numpy().tolist()}


if __name__ == "__main__":
    arguments, _ = argparse.ArgumentParser(parents=[model_server.parser]).parse_known_args()
    configure_logging()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # Without handlers, uvicorn does not format its access log.
    logging.getLogger("uvicorn.access").handlers.clear()
    ModelServer().start([Transformer(arguments.model_name)])
