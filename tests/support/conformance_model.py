"""The model of `make test-triton`. It runs in Triton.

A request returns its VALUES, and in LAST_STEPS the number of steps that the previous request ran. It takes
STEPS steps of 50 ms, or fails if that is negative. A decoupled model returns a response after each step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

STEP_S = 0.05


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self.is_decoupled = policy.get("decoupled", False)
        self.last_steps = 0

    def execute(self, requests: list[Any]) -> list[Any] | None:
        responses = [self.answer(request) for request in requests]
        return None if self.is_decoupled else responses

    def answer(self, request: Any) -> Any:
        steps = int(pb_utils.get_input_tensor_by_name(request, "STEPS").as_numpy().flat[0])
        if steps < 0:
            raise ValueError("it was made to fail")
        values = pb_utils.get_input_tensor_by_name(request, "VALUES").as_numpy()
        last_steps, self.last_steps = self.last_steps, 0
        sender = request.get_response_sender() if self.is_decoupled else None
        response = pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("RESULT", values),
                pb_utils.Tensor("LAST_STEPS", np.array([[last_steps]], np.int32)),
            ]
        )
        # Tritons before 23.10 do not have the method.
        is_cancelled = getattr(request, "is_cancelled", lambda: False)
        while self.last_steps < steps and not is_cancelled():
            time.sleep(STEP_S)
            self.last_steps += 1
            if sender is not None:
                sender.send(response)
        if sender is None:
            return response
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
