"""A request that works, made from a model's signature: as a curl line and in Python. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.tensors.dtypes import Kind
from gateway.tensors.payload import EVENT_STREAM, JSON, NDJSON
from gateway.tensors.signature import Layout, Signature, Tensor

ANY_SIZE = 2
# Above this, an example is written as a program that makes the values.
MANY_VALUES = 64


@dataclass(frozen=True)
class Example:
    """A body that the model takes: of a file, of a text, or of JSON."""

    content_type: str
    file: str = ""
    text: str = ""
    json: Any = None


def example(signature: Signature) -> Example:
    """The simplest request: the only input alone, or every required input by name."""
    candidates = signature.required or list(signature.inputs.values())
    if len(candidates) != 1:
        return Example(JSON, json={"inputs": named_examples(signature)})
    (tensor,) = candidates
    if tensor.datatype.kind is Kind.BYTES and whole(tensor):
        if tensor.content_type.startswith("image/"):
            return Example("image/png", file="image.png")
        return Example("text/plain", text="some text")
    if tensor.image is not None and tensor.image.layout is not Layout.GREY:
        return Example("image/png", file="image.png")
    return Example(JSON, json={"inputs": {tensor.name: json_example(tensor)}})


def named_examples(signature: Signature) -> dict[str, Any]:
    """Every required input; where all are optional the first, for Triton takes no request without any."""
    shown = signature.required or list(signature.inputs.values())[:1]
    return {tensor.name: json_example(tensor) for tensor in shown}


def whole(tensor: Tensor) -> bool:
    """One value is enough for it."""
    return all(size in (1, -1) for size in tensor.shape)


def json_example(tensor: Tensor) -> Any:
    """A value of the tensor's own shape; unknown sizes are 2, `[1]` is a single value."""
    value: Any = tensor.datatype.example
    if tensor.shape == (1,):
        return value
    for size in reversed(tensor.shape):
        value = [value] * (ANY_SIZE if size < 0 else size)
    return value


def path_of(signature: Signature) -> str:
    version = f"/versions/{signature.version}" if signature.version else ""
    return f"/v1/models/{signature.model}{version}/infer"


def count(value: Any) -> int:
    return sum(map(count, value)) if isinstance(value, list) else 1


def is_long(document: Mapping[str, Any]) -> bool:
    return sum(count(value) for value in document["inputs"].values()) > MANY_VALUES


def curl(signature: Signature, base_url: str) -> str:
    """A line to paste into a shell; a model that answers several times is streamed."""
    shown = example(signature)
    url = shlex.quote(f"{base_url}{path_of(signature)}")
    header = f"-H {shlex.quote(f'Content-Type: {shown.content_type}')}"
    ask = "curl -s"
    if signature.decoupled:
        ask, header = "curl -sN", f"{header} -H {shlex.quote(f'Accept: {EVENT_STREAM}')}"
    if shown.file:
        return f"{ask} --data-binary @{shown.file} {header} {url}"
    if shown.text:
        return f"{ask} -d {shlex.quote(shown.text)} {header} {url}"
    if is_long(shown.json):
        program = f"import json; print(json.dumps({compact(shown.json)}))"
        return f"python3 -c {shlex.quote(program)} | {ask} -d @- {header} {url}"
    return f"{ask} -d {shlex.quote(orjson.dumps(shown.json).decode())} {header} {url}"


def python(signature: Signature, base_url: str) -> str:
    """The same in Python, on the standard library alone."""
    shown = example(signature)
    if shown.file:
        body = f'open("{shown.file}", "rb").read()'
    elif shown.text:
        body = f"{shown.text!r}.encode()"
    else:
        body = f"json.dumps({compact(shown.json)}).encode()"
    headers = f'"Content-Type": "{shown.content_type}"'
    ask = 'print(json.load(urllib.request.urlopen(request))["outputs"])\n'
    if signature.decoupled:
        headers += f', "Accept": "{NDJSON}"'
        ask = "for answer in urllib.request.urlopen(request):\n    print(json.loads(answer))\n"
    return (
        "import json, urllib.request\n"
        f"body = {body}\n"
        f"headers = {{{headers}}}\n"
        f"request = urllib.request.Request({base_url + path_of(signature)!r}, body, headers)\n"
        f"{ask}"
    )


def compact(value: Any) -> str:
    """A Python expression of the value, in which equal rows are written once."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {compact(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{compact(value[0])}] * {len(value)}" if value else "[]"
    return repr(value)
