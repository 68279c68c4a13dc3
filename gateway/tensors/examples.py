"""Example requests for a model, as a curl command and as a Python program. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.media_types import EVENT_STREAM, JSON, NDJSON
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.signature import ChannelLayout, Signature, TensorSpec

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
    json: Any = None


def build_example_body(signature: Signature) -> ExampleBody:
    """Return the simplest body: the only input alone, or every required input by name."""
    candidates = signature.required_inputs or list(signature.inputs.values())
    if len(candidates) != 1:
        return ExampleBody(JSON, json={"inputs": build_example_inputs(signature)})
    (tensor,) = candidates
    if tensor.datatype.kind is DatatypeKind.BYTES and tensor.can_be_single:
        if tensor.content_type.startswith("image/"):
            return ExampleBody("image/png", file_name="image.png")
        return ExampleBody("text/plain", text="some text")
    if tensor.image_spec is not None and tensor.image_spec.layout is not ChannelLayout.GREY:
        return ExampleBody("image/png", file_name="image.png")
    return ExampleBody(JSON, json={"inputs": {tensor.name: build_example_value(tensor)}})


def build_example_inputs(signature: Signature) -> dict[str, Any]:
    # Triton rejects a request without inputs, so the first one is shown if all of them are optional.
    tensors = signature.required_inputs or list(signature.inputs.values())[:1]
    return {tensor.name: build_example_value(tensor) for tensor in tensors}


def build_example_value(tensor: TensorSpec) -> Any:
    value: Any = tensor.datatype.example
    if tensor.shape == (1,):
        return value
    for size in reversed(tensor.shape):
        value = [value] * (EXAMPLE_SIZE if size < 0 else size)
    return value


def build_infer_path(signature: Signature) -> str:
    version = f"/versions/{signature.version}" if signature.version else ""
    return f"/v1/models/{signature.model}{version}/infer"


def build_infer_target(signature: Signature) -> str:
    """Return the path, with a query for the best classes if an output has labels."""
    has_labels = any(tensor.has_class_labels for tensor in signature.outputs.values())
    query = f"?classification={EXAMPLE_CLASSES}" if has_labels else ""
    return f"{build_infer_path(signature)}{query}"


def count_values(value: Any) -> int:
    return sum(map(count_values, value)) if isinstance(value, list) else 1


def format_curl_example(signature: Signature, base_url: str) -> str:
    example = build_example_body(signature)
    url = shlex.quote(f"{base_url}{build_infer_target(signature)}")
    header = f"-H {shlex.quote(f'Content-Type: {example.content_type}')}"
    command = "curl -s"
    if signature.is_decoupled:
        command, header = "curl -sN", f"{header} -H {shlex.quote(f'Accept: {EVENT_STREAM}')}"
    if example.file_name:
        return f"{command} --data-binary @{example.file_name} {header} {url}"
    if example.text:
        return f"{command} -d {shlex.quote(example.text)} {header} {url}"
    if sum(map(count_values, example.json["inputs"].values())) > MAX_INLINE_VALUES:
        program = f"import json; print(json.dumps({format_python_literal(example.json)}))"
        return f"python3 -c {shlex.quote(program)} | {command} -d @- {header} {url}"
    return f"{command} -d {shlex.quote(orjson.dumps(example.json).decode())} {header} {url}"


def format_python_example(signature: Signature, base_url: str) -> str:
    example = build_example_body(signature)
    if example.file_name:
        body = f'open("{example.file_name}", "rb").read()'
    elif example.text:
        body = f"{example.text!r}.encode()"
    else:
        body = f"json.dumps({format_python_literal(example.json)}).encode()"
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


def format_python_literal(value: Any) -> str:
    # All elements of a list in an example are equal.
    if isinstance(value, dict):
        items = (f"{key!r}: {format_python_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{format_python_literal(value[0])}] * {len(value)}" if value else "[]"
    return repr(value)
