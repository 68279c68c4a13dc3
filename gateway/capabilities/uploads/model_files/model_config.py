"""The configs of uploaded models: parsing, generation, and the check that a config runs no code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf import json_format, text_format
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.capabilities.uploads.model_files.kinds import DATA_BACKENDS
from gateway.errors import TooLarge
from gateway.messages import join_names, quote_text
from gateway.tensors.dtypes import parse_datatype

MAX_CONFIG_BYTES: Final = 256 << 10
MAX_REASON_CHARS: Final = 200
# The backends of Triton's older field `platform`.
PLATFORM_BACKENDS: Final = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "ensemble",
}
CODE_ADVICE: Final = (
    "a model with code needs GATEWAY_MODEL_UPLOADS=code and a key that may manage all models, or: "
    "triton-gateway up FOLDER"
)
# Fields by which a config runs code or reads files outside of the model's folder.
CODE_FIELDS: Final = frozenset(
    ("runtime", "op_library_filename", "model_repository_agents", "ensemble_scheduling")
)
FILE_NAME_FIELDS: Final = frozenset(
    ("default_model_filename", "label_filename", "input_data_file", "data_file")
)
FILE_NAMES_FIELD: Final = "cc_model_filenames"
PARAMETERS_FIELD: Final = "parameters"  # the model, its accelerators and its agents have one
PATH_PARAMETER: Final = re.compile(r"path|librar|extension|plugin", re.IGNORECASE)
GATEWAY_PARAMETERS: Final = "gateway."  # read by the gateway only
PATH_CHARACTERS: Final = frozenset("/\\$~")
THREADS_PARAMETER: Final = re.compile(r"thread|stream", re.IGNORECASE)
LEADING_NUMBER: Final = re.compile(r"\s*\+?0*([0-9]{1,9})")  # as far as backends read a number
MAX_INSTANCES: Final = 64
MAX_WARMUPS: Final = 10_000  # warm-up requests of an instance
MAX_SEQUENCES: Final = 10_000  # at a time
MAX_THREADS: Final = 256  # threads that one parameter may give an instance
MAX_PRIORITY_LEVELS: Final = 256  # each has a queue
ELEMENT_BYTES: Final = {
    number: parse_datatype(name).numpy_dtype.itemsize for name, number in DataType.items() if number
}
UNKNOWN_ELEMENT_BYTES: Final = 8  # assumed size of an unknown datatype


def parse_model_config(text: bytes, *, allow_unknown_fields: bool) -> Message:
    """Return the config of a text in Triton's format or in JSON. Raises `InvalidModelFile` or `TooLarge`."""
    if len(text) > MAX_CONFIG_BYTES:
        raise TooLarge(f"the config exceeds the limit of {MAX_CONFIG_BYTES} bytes")
    config: Message = ModelConfig()
    try:
        decoded = text.decode()
        if is_json_config(text):
            json_format.Parse(decoded, config, ignore_unknown_fields=allow_unknown_fields)
        else:
            text_format.Parse(decoded, config, allow_unknown_field=allow_unknown_fields)
    except (text_format.ParseError, json_format.ParseError, ValueError, RecursionError) as exc:
        reason = " ".join(str(exc).split())[:MAX_REASON_CHARS]
        raise InvalidModelFile(f"the config is not a valid model configuration: {reason}") from None
    return config


def is_json_config(text: bytes) -> bool:
    return text.lstrip()[:1] == b"{"


def find_backend(config: Any) -> str:
    """Return the declared backend; empty if Triton derives it from the files."""
    platform: str = config.platform
    return config.backend or PLATFORM_BACKENDS.get(platform, platform)


def encode_model_config(text: bytes, config: Any, backend: str) -> bytes:
    """Return the content of config.pbtxt, with the backend, which other files must not decide."""
    if is_json_config(text):
        text = text_format.MessageToString(config).encode()
    return text if not backend or find_backend(config) else declare_backend(backend) + text


def declare_backend(backend: str) -> bytes:
    """Return a config with the backend; Triton derives the rest from the model file."""
    return b'backend: "%b"\n' % backend.encode()


def check_config_name(config: Any, model: str) -> None:
    if config.name not in ("", model):
        raise InvalidModelFile(
            f"the config is that of model {quote_text(config.name)}; leave the name out, or set it to "
            f"{quote_text(model)}"
        )


def check_data_config(config: Any) -> None:
    """Check that a config runs no code, and reads no files outside the folder. Raises `InvalidModelFile`."""
    backend = find_backend(config)
    if backend and backend not in DATA_BACKENDS:
        raise InvalidModelFile(
            f"the config has the backend {quote_text(backend)}; GATEWAY_MODEL_UPLOADS=artifacts accepts "
            f"{join_names(sorted(DATA_BACKENDS))}, whose models are data; {CODE_ADVICE}"
        )
    for name, value in walk_fields(config):
        if name in CODE_FIELDS and value:
            raise InvalidModelFile(
                f"the config contains {name}, which GATEWAY_MODEL_UPLOADS=artifacts does not accept"
            )
        if name in FILE_NAME_FIELDS and not is_plain_file_name(value):
            raise InvalidModelFile(f"{name} in the config must be a file name without a folder")
        if name == FILE_NAMES_FIELD and not all(map(is_plain_file_name, value.values())):
            raise InvalidModelFile(f"{name} in the config must contain file names without a folder")
        if name == PARAMETERS_FIELD:
            check_parameters(value)


def check_config_limits(config: Any, max_tensor_bytes: int) -> None:
    """Check the counts and sizes that a small config can make expensive. Raises `InvalidModelFile`."""
    instances = sum(
        max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group
    )
    check_limit("instances", instances, MAX_INSTANCES)
    # Triton makes a request for each element of the batch, and sends all of them `count` times.
    warmups = sum(max(each.count, 1) * max(each.batch_size, 1) for each in config.model_warmup)
    check_limit("warm-up requests", warmups, MAX_WARMUPS)
    if config.HasField("sequence_batching"):
        # The direct strategy has a slot for each element of a batch, in each instance.
        slots = max(config.sequence_batching.oldest.max_candidate_sequences, config.max_batch_size)
        sequences = max(slots, 1) * max(instances, 1)
        check_limit("sequences", sequences, MAX_SEQUENCES)
    levels = config.dynamic_batching.priority_levels
    check_limit("priority levels", levels, MAX_PRIORITY_LEVELS)
    tensors = [tensor for warmup in config.model_warmup for tensor in warmup.inputs.values()]
    for state in config.sequence_batching.state:
        tensors += [state, *state.initial_state]
    needed_bytes = sum(find_tensor_bytes(tensor, max_tensor_bytes) for tensor in tensors)
    what = "bytes of warm-up inputs and sequence states"
    check_limit(what, needed_bytes, max_tensor_bytes, "GATEWAY_MAX_BODY_BYTES")


def check_limit(what: str, count: int, limit: int, setting: str = "") -> None:
    if count > limit:
        by = f" ({setting})" if setting else ""
        raise InvalidModelFile(f"the config asks for {count} {what}; the limit is {limit}{by}")


def find_tensor_bytes(tensor: Any, limit: int) -> int:
    """Return the size of a tensor with `data_type` and `dims`, or a number above the limit."""
    size = ELEMENT_BYTES.get(tensor.data_type, UNKNOWN_ELEMENT_BYTES)
    for dimension in tensor.dims:
        size *= max(dimension, 1)  # -1 is any size
        if size > limit:  # the product of thousands of dimensions would take long
            break
    return size


def walk_fields(message: Message) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        yield field.name, value
        if field.message_type is None:
            nested = []
        elif isinstance(value, Message):
            nested = [value]
        else:
            values = value.values() if isinstance(value, Mapping) else value
            nested = [each for each in values if isinstance(each, Message)]
        for each in nested:
            yield from walk_fields(each)


def check_parameters(parameters: Any) -> None:
    for key, value in parameters.items():
        text = value if isinstance(value, str) else getattr(value, "string_value", "")
        if key.startswith(GATEWAY_PARAMETERS):
            continue
        if THREADS_PARAMETER.search(key) and (number := LEADING_NUMBER.match(text)):
            check_limit(f"threads with {quote_text(key)}", int(number[1]), MAX_THREADS)
        if PATH_PARAMETER.search(key) or ".." in text or PATH_CHARACTERS & set(text):
            raise InvalidModelFile(
                f"the parameter {quote_text(key)} in the config names a path, which "
                "GATEWAY_MODEL_UPLOADS=artifacts does not accept"
            )


def is_plain_file_name(name: str) -> bool:
    return name not in (".", "..") and not PATH_CHARACTERS & set(name)


def list_label_files(config: Any) -> list[str]:
    names = dict.fromkeys(output.label_filename for output in config.output)
    return [name for name in names if name]
