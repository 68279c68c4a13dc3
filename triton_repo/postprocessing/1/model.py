"""The postprocessing stage of the image pipeline, from scores to a JSON object of labels per item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .parameters import ParameterError, own_parameters, read, require
from .ranking import Ranking, ScoresError, read_labels


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        scores, result = config["input"][0], config["output"][0]
        self.input_name: str = scores["name"]
        self.output_name: str = result["name"]
        # `label_filename` is a field of Triton, relative to config.pbtxt.
        label_file = Path(args["model_repository"]) / (result.get("label_filename") or "labels.txt")
        try:
            self.rank = read(Ranking, own_parameters(config))
            self.labels = read_labels(label_file)
            self._check_count([int(size) for size in scores["dims"]])
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _check_count(self, dims: list[int]) -> None:
        count = len(self.labels)
        require(
            dims in ([count], [-1]),
            f"the input {self.input_name} has dims {dims}, but there are {count} labels",
        )
        require(
            self.rank.top_k <= count,
            f"top_k is {self.rank.top_k}, but there are only {count} labels",
        )

    def _respond(self, request: Any) -> Any:
        scores = pb_utils.get_input_tensor_by_name(request, self.input_name).as_numpy()
        try:
            results = [[self.rank(item, self.labels)] for item in scores]
        except ScoresError as error:
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=failure)
        output = pb_utils.Tensor(self.output_name, np.array(results, dtype=np.object_))
        return pb_utils.InferenceResponse([output])
