"""Texts joined by spaces, and how many characters that makes."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        names = ("TEXT_1", "TEXT_2", "TEXT_3")
        given = [pb_utils.get_input_tensor_by_name(request, name) for name in names]
        # An optional input that was not sent is None; a string is bytes in an array of objects.
        texts = [tensor.as_numpy()[0].decode() for tensor in given if tensor is not None]
        joined = " ".join(texts)
        result_1 = pb_utils.Tensor("RESULT_1", np.array([joined.encode()], dtype=object))
        result_2 = pb_utils.Tensor("RESULT_2", np.array([len(joined)], dtype=np.int32))
        # Whoever asks for one output gets that alone; Triton drops the other.
        return pb_utils.InferenceResponse([result_1, result_2])
