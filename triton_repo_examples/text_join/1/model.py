"""Strings joined by spaces, and the number of characters of the result."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        names = ("TEXT_1", "TEXT_2", "TEXT_3")
        tensors = [pb_utils.get_input_tensor_by_name(request, name) for name in names]
        # A missing optional input is None; strings are bytes in an object array.
        texts = [tensor.as_numpy()[0].decode() for tensor in tensors if tensor is not None]
        joined = " ".join(texts)
        result_1 = pb_utils.Tensor("RESULT_1", np.array([joined.encode()], dtype=object))
        result_2 = pb_utils.Tensor("RESULT_2", np.array([len(joined)], dtype=np.int32))
        # Triton drops an output that the client did not request.
        return pb_utils.InferenceResponse([result_1, result_2])
