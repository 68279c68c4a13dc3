"""A request that works, made from a model's signature: as a curl line and in Python. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.payload import EVENT_STREAM, JSON, NDJSON
from gateway.tensors.signature import ChannelLayout, Signature, TensorSpec

EXAMPLE_SIZE = 2
# Above this, an example is written as a program that makes the values.
MAX_INLINE_VALUES = 64


@dataclass(frozen=True)
class ExampleBody:
    """A body that the model takes: of a file, of a text, or of JSON."""

    content_type: str
    file_name: str = ""
    text: str = ""
    json: Any = None


def build_example_body(signature: Signature) -> ExampleBody:
    """The simplest request: the only input alone, or every required input by name."""
    candidates = signature.required_inputs or list(signature.inputs.values())
    if len(candidates) != 1:
        return ExampleBody(JSON, json={"inputs": build_example_inputs(signature)})
    (tensor,) = candidates
    if tensor.datatype.kind is DatatypeKind.BYTES and accepts_single_value(tensor):
        if tensor.content_type.startswith("image/"):
            return ExampleBody("image/png", file_name="image.png")
        return ExampleBody("text/plain", text="some text")
    if tensor.image_spec is not None and tensor.image_spec.layout is not ChannelLayout.GREY:
        return ExampleBody("image/png", file_name="image.png")
    return ExampleBody(JSON, json={"inputs": {tensor.name: build_example_value(tensor)}})


def build_example_inputs(signature: Signature) -> dict[str, Any]:
    """Every required input; where all are optional the first, for Triton takes no request without any."""
    shown = signature.required_inputs or list(signature.inputs.values())[:1]
    return {tensor.name: build_example_value(tensor) for tensor in shown}


def accepts_single_value(tensor: TensorSpec) -> bool:
    """One value is enough for it."""
    return all(size in (1, -1) for size in tensor.shape)


def build_example_value(tensor: TensorSpec) -> Any:
    """A value of the tensor's own shape; unknown sizes are 2, `[1]` is a single value."""
    value: Any = tensor.datatype.example
    if tensor.shape == (1,):
        return value
    for size in reversed(tensor.shape):
        value = [value] * (EXAMPLE_SIZE if size < 0 else size)
    return value


def build_infer_path(signature: Signature) -> str:
    version = f"/versions/{signature.version}" if signature.version else ""
    return f"/v1/models/{signature.model}{version}/infer"


def count_values(value: Any) -> int:
    return sum(map(count_values, value)) if isinstance(value, list) else 1


def has_many_values(document: Mapping[str, Any]) -> bool:
    return sum(count_values(value) for value in document["inputs"].values()) > MAX_INLINE_VALUES


def format_curl_example(signature: Signature, base_url: str) -> str:
    """A line to paste into a shell; a model that answers several times is streamed."""
    shown = build_example_body(signature)
    url = shlex.quote(f"{base_url}{build_infer_path(signature)}")
    header = f"-H {shlex.quote(f'Content-Type: {shown.content_type}')}"
    ask = "curl -s"
    if signature.is_decoupled:
        ask, header = "curl -sN", f"{header} -H {shlex.quote(f'Accept: {EVENT_STREAM}')}"
    if shown.file_name:
        return f"{ask} --data-binary @{shown.file_name} {header} {url}"
    if shown.text:
        return f"{ask} -d {shlex.quote(shown.text)} {header} {url}"
    if has_many_values(shown.json):
        program = f"import json; print(json.dumps({format_python_literal(shown.json)}))"
        return f"python3 -c {shlex.quote(program)} | {ask} -d @- {header} {url}"
    return f"{ask} -d {shlex.quote(orjson.dumps(shown.json).decode())} {header} {url}"


def format_python_example(signature: Signature, base_url: str) -> str:
    """The same in Python, on the standard library alone."""
    shown = build_example_body(signature)
    if shown.file_name:
        body = f'open("{shown.file_name}", "rb").read()'
    elif shown.text:
        body = f"{shown.text!r}.encode()"
    else:
        body = f"json.dumps({format_python_literal(shown.json)}).encode()"
    headers = f'"Content-Type": "{shown.content_type}"'
    ask = 'print(json.load(urllib.request.urlopen(request))["outputs"])\n'
    if signature.is_decoupled:
        headers += f', "Accept": "{NDJSON}"'
        ask = "for answer in urllib.request.urlopen(request):\n    print(json.loads(answer))\n"
    return (
        "import json, urllib.request\n"
        f"body = {body}\n"
        f"headers = {{{headers}}}\n"
        f"request = urllib.request.Request({base_url + build_infer_path(signature)!r}, body, headers)\n"
        f"{ask}"
    )


def format_python_literal(value: Any) -> str:
    """A Python expression of the value, in which equal rows are written once."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key!r}: {format_python_literal(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return f"[{format_python_literal(value[0])}] * {len(value)}" if value else "[]"
    return repr(value)
