"""A long computation in steps of 50 ms that stops when the request is cancelled."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        steps = int(pb_utils.get_input_tensor_by_name(request, "STEPS").as_numpy()[0])
        for step in range(steps):
            # Triton does not interrupt a model, so the model must check for cancellation.
            if request.is_cancelled():
                pb_utils.Logger.log_warn(f"cancellable: cancelled after {step} steps of {steps}")
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                return pb_utils.InferenceResponse(error=error)
            time.sleep(0.05)
        return pb_utils.InferenceResponse([pb_utils.Tensor("DONE", np.array([steps], np.int32))])
