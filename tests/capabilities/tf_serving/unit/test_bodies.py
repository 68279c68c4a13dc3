"""The bodies of `:predict`: predictions belong to instances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.capabilities.tf_serving.bodies import build_model_metadata, encode_results
from gateway.errors import ModelFault
from gateway.tensors.outputs import InferResult
from gateway.tensors.signature import build_signature


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"IDS": np.ones((2, 4))}, "returned 2 values for 3 instances in output 'IDS'"),
        ({"IDS": np.ones((4, 4))}, "returned 4 values for 3 instances"),
        ({"IDS": np.array(1)}, "returned a single value for 3 instances"),
        (
            {"IDS": np.ones((3, 4)), "MORE": np.ones(2)},
            "2 values for 3 instances in output 'MORE'",
        ),
        ({"MORE": np.array(1)}, "returned a single value for 3 instances"),
        ({}, "returned no outputs"),
    ],
)
def test_predictions_must_match_the_instances(answer: dict[str, np.ndarray], words: str) -> None:
    metadata: dict[str, Any] = {
        "name": "several",
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [
            {"name": "IDS", "datatype": "INT32", "shape": [-1, -1]},
            {"name": "MORE", "datatype": "INT32", "shape": [-1, 1]},
        ],
    }
    several = build_signature(metadata, {"max_batch_size": 2})
    with pytest.raises(ModelFault, match=words):
        encode_results([InferResult(several, answer, is_batched=True, instance_count=3)])


@pytest.mark.parametrize(
    ("datatype", "name"),
    [
        ("FP16", "DT_HALF"),
        ("BF16", "DT_BFLOAT16"),
        ("FP32", "DT_FLOAT"),
        ("FP64", "DT_DOUBLE"),
        ("INT64", "DT_INT64"),
        ("BOOL", "DT_BOOL"),
        ("BYTES", "DT_STRING"),
    ],
)
def test_datatype_has_its_name_in_tensorflow(datatype: str, name: str) -> None:
    tensor = {"name": "X", "datatype": datatype, "shape": [1]}
    signature = build_signature({"name": "m", "inputs": [tensor], "outputs": [tensor]}, {})
    definitions = build_model_metadata(signature)["metadata"]["signature_def"]["signature_def"]
    assert definitions["serving_default"]["inputs"]["X"]["dtype"] == name
