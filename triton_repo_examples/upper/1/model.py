"""Texts in capitals, all requests of a batch at once."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # Triton hands over the requests it batched; joining their rows is the model's business.
        texts = [pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy() for r in requests]
        ends = np.cumsum([len(rows) for rows in texts])[:-1]
        results = np.split(capitals(np.concatenate(texts)), ends)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", rows)]) for rows in results]


def capitals(texts):
    """[rows, 1] → [rows, 1]; a text is UTF-8, and its capitals may be longer: ß is SS."""
    raised = [text.decode().upper().encode() for text in texts.ravel()]
    return np.array(raised, dtype=object).reshape(texts.shape)
