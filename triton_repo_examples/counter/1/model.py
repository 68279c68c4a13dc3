"""A running total for each sequence of requests."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # The Python backend has no implicit state, so the model keeps the state of each sequence.
        self.totals = {}

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        def value(name):
            return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0])

        sequence = value("CORRID")
        if value("START"):
            # This also resets a sequence that timed out, because Triton does not report timeouts.
            self.totals[sequence] = 0
        if value("READY"):
            self.totals[sequence] += value("VALUE")
        total = np.array([[self.totals[sequence]]], np.int64)
        if value("END"):
            del self.totals[sequence]
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
