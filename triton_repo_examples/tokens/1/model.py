"""Text generation, one word at a time: each word followed the previous word in CORPUS.

The inputs and outputs have the names of Triton's vLLM and TensorRT-LLM backends.
"""

import asyncio
import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import triton_python_backend_utils as pb_utils

CORPUS = """the ship left the harbour at dawn and the sea was calm
at noon the wind rose and the sea grew dark and the crew took in the sails
the night was long and the harbour was far and the wind was cold
at dawn the ship came home and the crew slept"""


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.pause_s = float(parameters["seconds_per_token"]["string_value"])
        words = CORPUS.split()
        self.following = defaultdict(list)
        for word, follower in pairwise(words):
            self.following[word].append(follower)

    async def execute(self, requests):
        # A coroutine of a decoupled model can run while others wait.
        await asyncio.gather(*map(self.generate, requests))

    async def generate(self, request):
        sender = request.get_response_sender()
        streaming = value(request, "stream", False)
        words = []
        for word in self.words(value(request, "text_input", b"").decode()):
            if len(words) == value(request, "max_tokens", 16) or sender.is_cancelled():
                break
            await asyncio.sleep(self.pause_s)
            words.append(f" {word}")
            if streaming:
                sender.send(answer(words[-1]))
        if not streaming:
            sender.send(answer("".join(words)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def words(self, prompt):
        # The words after the prompt's last word are deterministic and end with CORPUS.
        word = prompt.lower().split()[-1] if prompt.split() else "the"
        uses = defaultdict(int)
        while followers := self.following.get(word):
            uses[word] += 1
            word = followers[(uses[word] - 1) % len(followers)]
            yield word


def value(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]


def answer(text):
    tensor = pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))
    return pb_utils.InferenceResponse([tensor])
