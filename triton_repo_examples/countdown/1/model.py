"""Counts down to zero, an answer for each number, SECONDS apart (0.1 if it is not said)."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        """While one request waits the next is executed: an ordinary `execute` would hold it up."""
        await asyncio.gather(*map(self.count, requests))

    async def count(self, request):
        seconds = pb_utils.get_input_tensor_by_name(request, "SECONDS")
        pause_s = 0.1 if seconds is None else float(seconds.as_numpy()[0])
        number = int(pb_utils.get_input_tensor_by_name(request, "FROM").as_numpy()[0])
        sender = request.get_response_sender()
        while number >= 0 and not sender.is_cancelled():
            tensor = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([tensor]))
            number -= 1
            await asyncio.sleep(pause_s if number >= 0 else 0)
        if number >= 0:
            pb_utils.Logger.log_warn(f"countdown: cancelled before {number}")
        # Without the flag the request never ends; it is wanted after a cancellation as well.
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
