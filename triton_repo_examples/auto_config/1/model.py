"""The mean of numbers, by a model that defines its config in code instead of config.pbtxt."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        # Triton calls this before `initialize`, in another process. A config.pbtxt takes precedence.
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.add_input({"name": "NUMBERS", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "MEAN", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        numbers = pb_utils.get_input_tensor_by_name(request, "NUMBERS").as_numpy()
        mean = numbers.mean(axis=1, keepdims=True, dtype=np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("MEAN", mean)])
