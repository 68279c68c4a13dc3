"""Business Logic Scripting: what to ask of other models is decided by what they answer."""

import asyncio
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.models = {name: value["string_value"] for name, value in parameters.items()}

    async def execute(self, requests):
        return await asyncio.gather(*map(self.respond, requests))

    async def respond(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        # This one blocks until it is answered. `upper` has a batch dimension, and BLS adds none.
        raised = inference(self.models["raise"], "RESULT", TEXT=text.reshape(1, 1)).exec()
        capitals = output(raised, "RESULT").reshape(1)
        if (capitals == text).all():
            return pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", text)])
        # Two at the same time: one model in its two versions.
        greetings = await asyncio.gather(
            *(inference(self.models["greet"], "GREETING", version, NAME=text).async_exec()
              for version in (1, 2))
        )  # fmt: skip
        result = capitals
        for greeting in greetings:
            texts = {"TEXT_1": result, "TEXT_2": output(greeting, "GREETING")}
            joined = await inference(self.models["join"], "RESULT_1", **texts).async_exec()
            result = output(joined, "RESULT_1")
        return pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", result)])


def inference(model, wanted, version=-1, **inputs):
    """A request to another model of this server; version -1 is what its version policy says."""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model, model_version=version, requested_output_names=[wanted], inputs=tensors
    )


def output(response, name):
    """A failure of another model is not raised: it has to be asked for."""
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, name).as_numpy()
