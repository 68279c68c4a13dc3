"""A Python-based backend in place of Triton's backends that the embedded Triton lacks: it says what to do."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

import triton_python_backend_utils as pb_utils

ADVICE: Final = {
    "pytorch": "export the model to ONNX with torch.onnx.export",
    "tensorflow": "convert the model to ONNX with tf2onnx",
    "tensorrt": "serve the ONNX file from which the plan was built",
    "openvino": "serve the ONNX file from which the model was converted",
}


class TritonPythonModel:
    """A model that cannot be loaded."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        refuse_model(config.as_dict()["backend"])

    def initialize(self, args: dict[str, str]) -> None:
        refuse_model(json.loads(args["model_config"])["backend"])


def refuse_model(backend: str) -> NoReturn:
    raise pb_utils.TritonModelException(
        f"the embedded Triton has no {backend} backend; {ADVICE[backend]}, or serve the model with the "
        "official Triton image"
    )
