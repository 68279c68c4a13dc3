"""Errors of the ONNX Runtime backend, and the reasons that onnxruntime gives."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

import triton_python_backend_utils as pb_utils

# ONNX Runtime's errors: a code, then often the file or node, the C++ source, and at last the reason.
ERROR_CODE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
ERROR_PLACE: Final = re.compile(r"^.*?(?: failed:|Status Message: |Error: )", re.DOTALL)
ERROR_SOURCE: Final = re.compile(r"\S+\.(?:cc|h):\d+ (?:[^()]*\([^()]*\) )?")
FOLDER: Final = re.compile(r"/[^\s\"']*/")
ERROR_ADVICE: Final = " Please fix either the inputs/outputs or the model."


def fail(message: str) -> NoReturn:
    raise pb_utils.TritonModelException(message)


def refuse_request(message: str) -> Any:
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)


def explain_error(error: Exception) -> str:
    """Return the reason that an error of onnxruntime gives, without names of nodes and source files."""
    text = ERROR_PLACE.sub("", ERROR_CODE.sub("", str(error)))
    text = FOLDER.sub("", ERROR_SOURCE.sub("", text))
    return " ".join(text.split()).removesuffix(ERROR_ADVICE).rstrip(".")
