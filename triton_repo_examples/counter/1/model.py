"""A running total for each sequence of requests."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # The Python backend has no implicit state: what a sequence needs is kept here.
        self.totals = {}

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        def value(name):
            return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0])

        sequence = value("CORRID")
        if value("START"):
            # Also what is left of one that never ended: Triton forgets it without telling.
            self.totals[sequence] = 0
        if value("READY"):
            self.totals[sequence] += value("VALUE")
        total = np.array([[self.totals[sequence]]], np.int64)
        if value("END"):
            del self.totals[sequence]
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
