"""Upper-case strings, computed for all requests of a batch at once."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # Triton passes the batched requests separately, so the model concatenates their rows.
        texts = [pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy() for r in requests]
        ends = np.cumsum([len(rows) for rows in texts])[:-1]
        results = np.split(capitals(np.concatenate(texts)), ends)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", rows)]) for rows in results]


def capitals(texts):
    # Upper case can be longer: ß becomes SS.
    upper = [text.decode().upper().encode() for text in texts.ravel()]
    return np.array(upper, dtype=object).reshape(texts.shape)
