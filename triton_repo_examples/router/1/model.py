"""A Business Logic Scripting (BLS) model whose calls depend on the responses of other models."""

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
        # `exec` blocks until the response. `upper` has a batch dimension, which BLS does not add.
        upper = inference(self.models["raise"], "RESULT", TEXT=text.reshape(1, 1)).exec()
        capitals = output(upper, "RESULT").reshape(1)
        if (capitals == text).all():
            return pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", text)])
        # These calls of the two versions of one model run at the same time.
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


def inference(model, output_name, version=-1, **inputs):
    # Version -1 selects the version by the model's version policy.
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model,
        model_version=version,
        requested_output_names=[output_name],
        inputs=tensors,
    )


def output(response, name):
    # BLS does not raise the error of another model.
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, name).as_numpy()
