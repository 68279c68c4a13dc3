"""How many steps a number takes to 1: halve it, or if it is odd, triple it and add one.

A step of every request at each execution: the short ones need not wait for the long ones.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.running = {}  # number and steps by the sequence that Triton makes of each request

    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            # Also over what is left of one that was cancelled: Triton forgets it without telling.
            given = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
            self.running[sequence] = int(given[0, 0]), 0
        number, steps = self.running.pop(sequence)
        if number <= 1:
            tensor = pb_utils.Tensor("STEPS", np.array([[steps]], np.int32))
            return pb_utils.InferenceResponse([tensor])
        self.running[sequence] = (3 * number + 1 if number % 2 else number // 2, steps + 1)
        # The same request comes again, inputs and all, in a later execution; until then no answer.
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
