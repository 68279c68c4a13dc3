"""Formatting of byte sizes with a package that only this model has installed."""

import humanize
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        count = int(pb_utils.get_input_tensor_by_name(request, "BYTES").as_numpy()[0])
        size = np.array([humanize.naturalsize(count).encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SIZE", size)])
