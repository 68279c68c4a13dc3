"""Example requests for a model, as a curl command and as a Python program. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.media_types import EVENT_STREAM, JSON, NDJSON, OCTET_STREAM
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.signature import ChannelLayout, Signature, TensorSpec

EXAMPLE_IMAGE = "image.png"
EXAMPLE_SIZE = 2
EXAMPLE_CLASSES = 3
# With more values than this, the curl example generates the body with a program.
MAX_INLINE_VALUES = 64


@dataclass(frozen=True)
class ExampleBody:
    """A request body that the model accepts: a file, a string or a JSON document."""

    content_type: str
    file_name: str = ""
    text: str = ""
    tensors: tuple[TensorSpec, ...] = ()  # the inputs in a JSON document


def build_example_body(signature: Signature) -> ExampleBody:
    """Return the simplest body: the only input alone, or every required input by name."""
    candidates = signature.required_inputs or list(signature.inputs.values())
    if len(candidates) != 1:
        return ExampleBody(JSON, tensors=choose_example_tensors(signature))
    (tensor,) = candidates
    if tensor.datatype.kind is DatatypeKind.BYTES and tensor.can_be_single:
        if tensor.content_type.startswith("image/"):
            return ExampleBody("image/png", file_name=EXAMPLE_IMAGE)
        return ExampleBody("text/plain", text="some text")
    if tensor.image_spec is not None and tensor.image_spec.layout is not ChannelLayout.GREY:
        return ExampleBody("image/png", file_name=EXAMPLE_IMAGE)
    if tensor.takes_file_bytes and tensor.shape == (-1,):
        return ExampleBody(OCTET_STREAM, file_name=EXAMPLE_IMAGE)
    return ExampleBody(JSON, tensors=(tensor,))


def choose_example_tensors(signature: Signature) -> tuple[TensorSpec, ...]:
    # Triton rejects a request without inputs, so the first one is shown if all of them are optional.
    return tuple(signature.required_inputs or list(signature.inputs.values())[:1])


def choose_example_sizes(tensor: TensorSpec) -> list[int]:
    """Return the shape of an example value; empty for a single one."""
    shape = () if tensor.shape == (1,) else tensor.shape
    return [EXAMPLE_SIZE if size < 0 else size for size in shape]


def count_example_values(tensors: Iterable[TensorSpec]) -> int:
    """Return the number of values, or of empty lists, without building them: a shape can have billions."""
    return sum(math.prod(size or 1 for size in choose_example_sizes(tensor)) for tensor in tensors)


def build_example_inputs(tensors: Iterable[TensorSpec]) -> dict[str, Any]:
    return {tensor.name: build_example_value(tensor) for tensor in tensors}


def build_example_value(tensor: TensorSpec) -> Any:
    value: Any = tensor.datatype.example
    for size in reversed(choose_example_sizes(tensor)):
        value = [value] * size
    return value


def build_infer_path(signature: Signature) -> str:
    version = f"/versions/{signature.version}" if signature.version else ""
    return f"/v1/models/{signature.model}{version}/infer"


def build_infer_target(signature: Signature) -> str:
    """Return the path, with a query for the best classes if an output has labels."""
    has_labels = any(tensor.has_class_labels for tensor in signature.outputs.values())
    query = f"?classification={EXAMPLE_CLASSES}" if has_labels else ""
    return f"{build_infer_path(signature)}{query}"


def format_curl_example(signature: Signature, base_url: str) -> str:
    example = build_example_body(signature)
    url = shlex.quote(f"{base_url}{build_infer_target(signature)}")
    header = f"-H {shlex.quote(f'Content-Type: {example.content_type}')}"
    command = "curl -s"
    if signature.is_decoupled:
        command = "curl -sN"
        header = f"{header} -H {shlex.quote(f'Accept: {EVENT_STREAM}')}"
    if example.file_name:
        return f"{command} --data-binary @{example.file_name} {header} {url}"
    if example.text:
        return f"{command} -d {shlex.quote(example.text)} {header} {url}"
    if count_example_values(example.tensors) > MAX_INLINE_VALUES:
        program = f"import json; print(json.dumps({format_python_document(example.tensors)}))"
        return f"python3 -c {shlex.quote(program)} | {command} -d @- {header} {url}"
    document = orjson.dumps({"inputs": build_example_inputs(example.tensors)}).decode()
    return f"{command} -d {shlex.quote(document)} {header} {url}"


def format_python_example(signature: Signature, base_url: str) -> str:
    example = build_example_body(signature)
    if example.file_name:
        body = f'open("{example.file_name}", "rb").read()'
    elif example.text:
        body = f"{example.text!r}.encode()"
    else:
        body = f"json.dumps({format_python_document(example.tensors)}).encode()"
    headers = f'"Content-Type": "{example.content_type}"'
    statement = 'print(json.load(urllib.request.urlopen(request))["outputs"])\n'
    if signature.is_decoupled:
        headers += f', "Accept": "{NDJSON}"'
        statement = "for line in urllib.request.urlopen(request):\n    print(json.loads(line))\n"
    return (
        "import json, urllib.request\n"
        f"body = {body}\n"
        f"headers = {{{headers}}}\n"
        f"request = urllib.request.Request({base_url + build_infer_target(signature)!r}, body, headers)\n"
        f"{statement}"
    )


def format_python_document(tensors: Iterable[TensorSpec]) -> str:
    """Return the JSON document as an expression, in which a list is its equal elements times their number."""
    items = ", ".join(f"{tensor.name!r}: {format_python_value(tensor)}" for tensor in tensors)
    return f"{{'inputs': {{{items}}}}}"


def format_python_value(tensor: TensorSpec) -> str:
    text = repr(tensor.datatype.example)
    for size in reversed(choose_example_sizes(tensor)):
        text = f"[{text}] * {size}" if size else "[]"
    return text
