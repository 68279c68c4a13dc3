"""Python-based backends of the embedded Triton.

Triton's stub processes import a copy of this package, named `PACKAGE_COPY`, in the models' environment; the
gateway imports only this module. Therefore, imports within the package are relative. `unsupported` stands for
the backends that this Triton lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
PACKAGE_COPY: Final = "triton_gateway_backends"


@dataclass(frozen=True)
class PythonBasedBackend:
    """A backend: its module, and the files by which Triton recognizes its models without a config."""

    module: str
    model_files: tuple[str, ...]

    @property
    def model_source(self) -> str:
        return f"from {PACKAGE_COPY}.{self.module} import TritonPythonModel\n"


PYTHON_BASED_BACKENDS: Final = {
    "onnxruntime": PythonBasedBackend("onnx_model", ("model.onnx",)),
    "openvino": PythonBasedBackend("unsupported", ("model.xml",)),
    "pytorch": PythonBasedBackend("unsupported", ("model.pt",)),
    "tensorflow": PythonBasedBackend("unsupported", ("model.savedmodel", "model.graphdef")),
    "tensorrt": PythonBasedBackend("unsupported", ("model.plan",)),
}
