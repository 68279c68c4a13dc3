"""A countdown to zero with one response per number, SECONDS apart (default 0.1)."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        # A coroutine lets Triton execute the next request while this one waits.
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
        # The request never ends without this flag, even after a cancellation.
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
