"""Version 1, which greets with "Hello"."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy()[0].decode()
        greeting = np.array([f"Hello, {name}!".encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("GREETING", greeting)])
