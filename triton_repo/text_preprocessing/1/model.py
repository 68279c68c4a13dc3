"""The preprocessing stage of the text pipeline, from BYTES strings to token ids and their mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .tokens import ParameterError, TextEncoder, TextError, settings_of


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            self.encoder = TextEncoder(folder, settings_of(json.loads(args["model_config"])))
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        # An invalid text fails only its own request.
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
        try:
            ids, mask = self.encoder.rows(texts)
        except TextError as error:
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=failure)
        tensors = [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
        return pb_utils.InferenceResponse(tensors)
