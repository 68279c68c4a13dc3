"""A weighted sum of INPUT0 and INPUT1, with the weights of a file that the config names."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        # "model_repository" is this model's own folder, not the repository.
        folder = Path(args["model_repository"]) / args["model_version"]
        self.weights = np.loadtxt(folder / config["parameters"]["model_path"]["string_value"])

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        total = self.weights[0] * left + self.weights[1] * right
        # Triton does not convert the output, so a float64 array would be an error.
        tensor = pb_utils.Tensor("OUTPUT0", total.astype(self.dtype))
        return pb_utils.InferenceResponse([tensor])

    def finalize(self):
        # Triton calls this when it unloads the model, but not when the server is killed.
        pb_utils.Logger.log_warn("add: finalized")
