"""The one Python model of the test repository: what it does is a parameter of its config.

It knows its tensors by their place in the config, never by name.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def identity(inputs: Sequence[Array]) -> Sequence[Array]:
    return inputs


def means(inputs: Sequence[Array]) -> Sequence[Array]:
    """Return the mean of each channel of an image, and the image itself, both as FP32."""
    image = inputs[0].astype(np.float32)
    return [image.mean(axis=tuple(range(1, image.ndim))).reshape(-1, 1), image]


def arithmetic(inputs: Sequence[Array]) -> Sequence[Array]:
    return [inputs[0] + inputs[1], inputs[0] * inputs[1]]


def sum_and_difference(inputs: Sequence[Array]) -> Sequence[Array]:
    """Return the sum and difference of numbers, or of texts that contain numbers."""
    if inputs[0].dtype != object:
        return [inputs[0] + inputs[1], inputs[0] - inputs[1]]
    first, second = (each.astype(np.int64) for each in inputs)
    return [
        np.char.encode(each.astype(str)).astype(object) for each in (first + second, first - second)
    ]


def scaled(inputs: Sequence[Array | None]) -> Sequence[Array]:
    """x·factor + offset; both may be missing."""
    x, factor, offset = inputs
    assert x is not None
    result = x if factor is None else x * factor
    return [result if offset is None else result + offset]


def first_given(inputs: Sequence[Array | None]) -> Sequence[Array]:
    return [next(each for each in inputs if each is not None)]


def not_utf8(inputs: Sequence[Array]) -> Sequence[Array]:
    rows = [[bytes([255, 254]) + value for value in row] for row in inputs[0]]
    return [np.array(rows, dtype=object)]


def picture(inputs: Sequence[Array]) -> Sequence[Array]:
    """A PNG, grey, as wide as the number says."""
    from PIL import Image  # noqa: PLC0415 - the process of every other model would import it as well

    pictures = []
    for width in inputs[0].ravel():
        file = io.BytesIO()
        Image.new("L", (int(width), 3), 77).save(file, "PNG")
        pictures.append([file.getvalue()])
    return [np.array(pictures, dtype=object)]


def as_json(inputs: Sequence[Array]) -> Sequence[Array]:
    return [np.array([[json.dumps({"got": v.decode()}).encode()] for (v,) in inputs[0]], object)]


def sleeping(inputs: Sequence[Array]) -> Sequence[Array]:
    time.sleep(float(inputs[0].ravel()[0]))
    return inputs


def failing(inputs: Sequence[Array]) -> Sequence[Array]:
    raise ValueError(f"boom {inputs[0].ravel()[0]!r} at 0x7f00deadbeef in /srv/secret/weights.bin")


def not_finite(inputs: Sequence[Array]) -> Sequence[Array]:
    return [np.array([[np.nan, np.inf, -np.inf, 1.5]] * len(inputs[0]), np.float32)]


def length(inputs: Sequence[Array]) -> Sequence[Array]:
    return [np.array([[len(value)] for (value,) in inputs[0]], np.int32)]


def widths(inputs: Sequence[Array]) -> Sequence[Array]:
    return [np.full((len(inputs[0]), 1), inputs[0].shape[1])]


def vectors(inputs: Sequence[Array]) -> Sequence[Array]:
    """Two vectors of a text, of 4 numbers each: its length n gives n+1, n+2, …, and their negatives.

    A text of 13 characters has no finite vector.
    """
    sizes = np.array([[len(value)] for value in inputs[0].ravel()], np.float32)
    sizes[sizes == 13] = np.nan
    found = sizes + np.arange(1, 5, dtype=np.float32)
    found = found.reshape(*inputs[0].shape[:-1], 4)
    return [found, -found]


def token_vectors(inputs: Sequence[Array]) -> Sequence[Array]:
    return [np.ones((len(inputs[0]), 2, 4), np.float32)]


def common_letters(inputs: Sequence[Array]) -> Sequence[Array]:
    """Return the number of different letters that the two texts of a row share."""
    shared = [len({*first} & {*second}) for (first,), (second,) in zip(*inputs, strict=True)]
    return [np.array(shared, np.float32).reshape(-1, 1)]


def two_rows_per_item(inputs: Sequence[Array]) -> Sequence[Array]:
    """Return two rows for each item, which begin with its index, as detectors do."""
    return [np.repeat(np.arange(len(inputs[0]), dtype=np.float32), 2).reshape(-1, 1)]


def mean(inputs: Sequence[Array]) -> Sequence[Array]:
    return [inputs[0].mean(axis=(1, 2, 3), dtype=np.float32).reshape(-1, 1)]


BEHAVIOURS: dict[str, Any] = {
    function.__name__: function
    for function in (
        identity, first_given, means, arithmetic, scaled, not_utf8, picture, as_json, sleeping, failing,
        not_finite, length, widths, mean, sum_and_difference, vectors, token_vectors, common_letters,
        two_rows_per_item,
    )
}  # fmt: skip


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.inputs = [entry["name"] for entry in config["input"]]
        self.outputs = [entry["name"] for entry in config["output"]]
        self.behaviour = config["parameters"]["behaviour"]["string_value"]
        self.folder = Path(args["model_repository"])
        self.counts: dict[int, int] = {}

    def execute(self, requests: Sequence[Any]) -> Sequence[Any] | None:
        if self.behaviour == "ticking":
            for request in requests:
                self.tick(request)
            return None  # as a decoupled model must
        if self.behaviour == "counting":
            return [self.count(request) for request in requests]
        if self.behaviour == "patient":
            return [self.wait(request) for request in requests]
        return [self.answer(request) for request in requests]

    def tick(self, request: Any) -> None:
        """COUNT answers, SECONDS apart: its number, and when it was made. A negative COUNT fails then.

        Negative SECONDS let it begin with an error. Whoever cancels it leaves a file with the number that was
        not made, and when that was seen.
        """
        self.note_begin()
        given = [pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs]
        count, pause_s = (tensor.as_numpy()[0] for tensor in given)
        sender = request.get_response_sender()
        if pause_s < 0:
            error = pb_utils.TritonError("boom first at /srv/secret/weights.bin")
            sender.send(pb_utils.InferenceResponse(error=error))
        for number in range(abs(count)):
            time.sleep(abs(float(pause_s)))
            if sender.is_cancelled():
                with (self.folder / "cancelled").open("a") as file:
                    file.write(f"{number} {time.time()}\n")
                break
            values = np.array([number], np.int32), np.array([time.time()])
            made = [pb_utils.Tensor(*pair) for pair in zip(self.outputs, values, strict=True)]
            sender.send(pb_utils.InferenceResponse(made))
        if count < 0:
            failing([np.array([count])])
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def count(self, request: Any) -> Any:
        """Return the number of requests of the sequence since its start, and who counted them."""
        sequence = request.correlation_id()
        flags = request.flags()
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.counts[sequence] = 0
        self.counts[sequence] += 1
        count = self.counts[sequence]
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.counts[sequence]
        return self.made([[count]], [[os.getpid()]])

    def wait(self, request: Any) -> Any:
        """Wait for SECONDS, or until it is cancelled; write to a file which, after how long, and when."""
        self.note_begin()
        given = pb_utils.get_input_tensor_by_name(request, self.inputs[0]).as_numpy()
        began = time.time()
        seconds = float(given.max())
        while (waited := time.time() - began) < seconds and not request.is_cancelled():
            time.sleep(min(0.01, seconds - waited))
        with (self.folder / "ends").open("a") as file:
            how = "cancelled" if request.is_cancelled() else "finished"
            file.write(f"{how} {waited} {time.time()}\n")
        return self.made(given)

    def note_begin(self) -> None:
        """A file has a byte for each request that was started."""
        with (self.folder / "started").open("a") as file:
            file.write(".")

    def made(self, *values: Any) -> Any:
        kinds = (np.float32,) if self.behaviour == "patient" else (np.int32, np.int64)
        arrays = [np.array(value, kind) for value, kind in zip(values, kinds, strict=True)]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(*pair) for pair in zip(self.outputs, arrays, strict=True)]
        )

    def answer(self, request: Any) -> Any:
        tensors = [pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs]
        if self.behaviour == "pass_through":  # whatever NumPy has no type for
            made = [
                pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
                for name, tensor in zip(self.outputs, tensors, strict=True)
            ]
            return pb_utils.InferenceResponse(made)
        if self.behaviour == "refusing":
            code, _, text = tensors[0].as_numpy().ravel()[0].decode().partition(":")
            error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, code))
            return pb_utils.InferenceResponse(error=error)
        arrays = [None if tensor is None else tensor.as_numpy() for tensor in tensors]
        results = BEHAVIOURS[self.behaviour](arrays)
        tensors = [
            pb_utils.Tensor(name, array) for name, array in zip(self.outputs, results, strict=True)
        ]
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([t for t in tensors if t.name() in wanted])
