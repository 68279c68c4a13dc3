"""The preprocessing stage of the image pipeline, from BYTES images to FP32 tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .parameters import ParameterError, own_parameters
from .picture import FloatArray, PictureError
from .transforms import preprocessing


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.input_name: str = config["input"][0]["name"]
        self.output_name: str = config["output"][0]["name"]
        try:
            self.tensor_of = preprocessing(own_parameters(config))
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._check_shape(config["output"][0]["dims"])

    def execute(self, requests: list[Any]) -> list[Any]:
        # An invalid image fails only its own request.
        return [self._respond(request) for request in requests]

    def _check_shape(self, dims: list[str | int]) -> None:
        declared = [int(size) for size in dims]
        produced = list(self.tensor_of.shape)
        if declared != produced:
            raise pb_utils.TritonModelException(
                f"the output {self.output_name} has dims {declared}, "
                f"but the transform's parameters produce {produced}"
            )

    def _respond(self, request: Any) -> Any:
        images = pb_utils.get_input_tensor_by_name(request, self.input_name).as_numpy().ravel()
        try:
            tensors = np.stack(
                [self._tensor(image, n, len(images)) for n, image in enumerate(images)]
            )
        except PictureError as error:
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=failure)
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.output_name, tensors)])

    def _tensor(self, image: bytes, index: int, count: int) -> FloatArray:
        try:
            return self.tensor_of(image)
        except PictureError as error:
            if count == 1:
                raise
            raise PictureError(f"image {index + 1} of {count}: {error}") from None
