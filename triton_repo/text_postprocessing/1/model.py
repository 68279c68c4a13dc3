"""The postprocessing stage of the text pipeline, which truncates and normalises embeddings."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from .embeddings import ParameterError, finish_of


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.input_name: str = config["input"][0]["name"]
        self.output_name: str = config["output"][0]["name"]
        try:
            self.finish = finish_of(config)
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        vectors = pb_utils.get_input_tensor_by_name(request, self.input_name).as_numpy()
        finished = pb_utils.Tensor(self.output_name, self.finish(vectors))
        return pb_utils.InferenceResponse([finished])
