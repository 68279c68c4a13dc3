"""A line of a stream is a line for every reader, whatever its text is, on a real tritonserver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.model_folders import write_model_folder
from tests.support.servers import gateway_before, triton_on_free_ports

# What `str.splitlines` takes for the end of a line, but for CR and LF, and characters that begin like these.
BREAKS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
NO_BREAKS = "\u2027é€\u00a0\U0001f600"
TEXT = f"one{BREAKS}two\r\n{NO_BREAKS}"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
CONFIG = """backend: "python"
max_batch_size: 0
input [{ name: "TEXT" data_type: TYPE_STRING dims: [1] }]
output [
  { name: "TOKEN" data_type: TYPE_STRING dims: [1] },
  { name: "DOCUMENT" data_type: TYPE_STRING dims: [1] }
]
model_transaction_policy { decoupled: true }
parameters { key: "gateway.content_type.DOCUMENT" value { string_value: "application/json" } }
"""
# Says the text; "fail …" is an error after the response, and "fail first …" instead of it.
CODE = """import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
            if not text.startswith("fail first"):
                document = json.dumps({"said": text}, ensure_ascii=False, indent=1)
                texts = (("TOKEN", text), ("DOCUMENT", document))
                tensors = [
                    pb_utils.Tensor(name, np.array([value.encode()], dtype=object))
                    for name, value in texts
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
            if text.startswith("fail"):
                error = pb_utils.TritonError(text)
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("repository")
    write_model_folder(folder / "say", CONFIG, {"1/model.py": CODE})
    with triton_on_free_ports(folder) as triton, gateway_before(triton.options.url) as client:
        yield client


def read_documents(body: bytes) -> list[Any]:
    """Return the JSON of each line, as a reader sees it that breaks lines wherever Python does."""
    lines = [line for line in body.decode().splitlines() if line]
    fields = ("id: ", "event: ")
    return [
        json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(fields)
    ]


def v1(accept: str, text: str = TEXT) -> tuple[str, dict[str, str], Any]:
    return "/v1/models/say/infer", {"Accept": accept}, {"inputs": text}


def v2(verb: str, text: str = TEXT) -> tuple[str, dict[str, str], Any]:
    return f"/v2/models/say/{verb}", {}, {"TEXT": text}


SAID = {"TOKEN": [TEXT], "DOCUMENT": [{"said": TEXT}]}
FAILED, FAILED_FIRST = f"fail {BREAKS}.", f"fail first {BREAKS}."
# The message of an error has one line.
MESSAGE = "fail ."
MESSAGE_FIRST = "fail first ."
ROWS: dict[str, tuple[tuple[str, dict[str, str], Any], int, list[dict[str, Any]]]] = {
    "events": (v1(EVENTS), 200, [{"outputs": SAID}, {}]),
    "lines": (v1(LINES), 200, [{"outputs": SAID}]),
    "event of a failure": (
        v1(EVENTS, FAILED), 200, [{"model": "say"}, {"code": "REFUSED_BY_MODEL", "error": MESSAGE}, {}],
    ),
    "line of a failure": (
        v1(LINES, FAILED), 200, [{"model": "say"}, {"code": "REFUSED_BY_MODEL", "error": MESSAGE}],
    ),
    "failure instead of a stream": (
        v1(EVENTS, FAILED_FIRST), 422, [{"code": "REFUSED_BY_MODEL", "error": MESSAGE_FIRST}],
    ),
    "generate_stream": (v2("generate_stream"), 200, [{"TOKEN": TEXT}]),
    "generate_stream that fails": (
        v2("generate_stream", FAILED), 200, [{"TOKEN": FAILED}, {"error": MESSAGE}],
    ),
    "generate_stream that fails first": (
        v2("generate_stream", FAILED_FIRST), 400, [{"error": MESSAGE_FIRST}],
    ),
    "generate": (v2("generate", "plain"), 200, [{"TOKEN": "plain"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_line_of_a_stream_is_a_line_for_every_reader(client: httpx.Client, name: str) -> None:
    (path, headers, body), status, expected = ROWS[name]
    response = client.post(path, headers=headers, json=body)
    assert response.status_code == status
    documents = read_documents(response.content)
    pairs = zip(documents, expected, strict=True)
    shown = [{key: document[key] for key in row} for document, row in pairs]
    assert shown == expected
