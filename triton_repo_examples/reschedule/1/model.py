"""The number of Collatz steps to 1: halve an even number, triple an odd one and add one.

Each execution makes one step for every request, so short requests do not wait for long ones.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.running = {}  # number and steps by the sequence id that Triton gives to each request

    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            # This also resets a cancelled sequence, because Triton does not report cancellations.
            start = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
            self.running[sequence] = int(start[0, 0]), 0
        number, steps = self.running.pop(sequence)
        if number <= 1:
            tensor = pb_utils.Tensor("STEPS", np.array([[steps]], np.int32))
            return pb_utils.InferenceResponse([tensor])
        self.running[sequence] = (3 * number + 1 if number % 2 else number // 2, steps + 1)
        # Triton executes the same request again later, so there is no response yet.
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
