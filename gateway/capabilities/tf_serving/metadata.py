"""TensorFlow Serving's description of a model's signature. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gateway.tensors.signature import Signature, TensorSpec

# The names of TensorFlow's `DataType`. That of an integer is "DT_" and Triton's.
DTYPES: Final = {
    "FP16": "DT_HALF",
    "BF16": "DT_BFLOAT16",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BYTES": "DT_STRING",
}


def build_model_metadata(signature: Signature) -> dict[str, Any]:
    """Return the document of `GET /v1/models/{model}/metadata`."""
    version = signature.version or next(iter(signature.versions[-1:]), "")
    definition = {
        "inputs": build_tensor_infos(signature, signature.inputs.values()),
        "outputs": build_tensor_infos(signature, signature.outputs.values()),
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": signature.model, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": {"serving_default": definition}}},
    }


def build_tensor_infos(signature: Signature, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
    batch = (-1,) if signature.supports_batching else ()
    return {
        tensor.name: {
            "name": tensor.name,
            "dtype": DTYPES.get(tensor.datatype.name, f"DT_{tensor.datatype.name}"),
            "tensor_shape": {
                "dim": [{"size": str(size), "name": ""} for size in (*batch, *tensor.shape)],
                "unknown_rank": False,
            },
        }
        for tensor in tensors
    }
