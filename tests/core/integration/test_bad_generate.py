"""A request that Triton's generate endpoints cannot read is the client's fault, on a real tritonserver.

Triton answers most of them with 500, as it does when a model has failed.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.errors import assert_error
from tests.support.model_zoo.zoo import Model, Names, T, identity, write_repository
from tests.support.servers import gateway_before, triton_on_free_ports

MODELS = (
    identity("text", "BYTES", (1,)),
    identity("numbers", "INT64", (-1,)),
    Model("failing", "failing", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 8),
)
MALFORMED = (400, "MALFORMED_REQUEST")
REFUSED = (400, "REFUSED_BY_MODEL")
DOES_NOT_FIT = (400, "DOES_NOT_FIT_MODEL")
FAULT = (500, "MODEL_FAULT")
# The model and the body, the status and code, and words of the message.
ROWS = (
    ("text", "[]", MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", '["a"]', MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", '"x"', MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", "1", MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", "true", MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", "null", MALFORMED, "non-object; send an object with the inputs by name"),
    ("text", "", MALFORMED, "The document is empty"),
    ("text", "{", MALFORMED, "Missing a name"),
    ("text", "{'X': 'a'}", MALFORMED, "Missing a name"),
    ("text", '{"X": "a"} x', MALFORMED, "must not be followed"),
    ("text", '{"X": "a", "parameters": []}', MALFORMED, "'parameters'"),
    ("text", '{"X": "a", "parameters": null}', MALFORMED, "'parameters'"),
    ("text", '{"X": "a", "id": 5}', MALFORMED, "'id'"),
    ("text", '{"X": "a", "A\\u0000": 1}', MALFORMED, "parameter key 'A'"),
    ("text", '{"X": {}}', MALFORMED, "non-string as string"),
    ("text", '{"X": null}', MALFORMED, "non-string as string"),
    ("text", '{"X": ["a", "b"]}', REFUSED, "proper shape"),
    ("text", '{"X": "a", "deep": [1]}', REFUSED, "parameter 'deep'"),
    ("text", "{}", DOES_NOT_FIT, "expected 1 inputs but got 0"),
    ("numbers", '{"X": "a"}', MALFORMED, "non-signed-integer"),
    ("numbers", '{"X": [1, 2.5]}', MALFORMED, "non-signed-integer"),
    ("numbers", '{"X": {"a": 1}}', MALFORMED, "non-signed-integer"),
    # The model ran.
    ("failing", '{"X": 1}', FAULT, "boom 1.0"),
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder, Names(), MODELS)
    with triton_on_free_ports(folder) as triton, gateway_before(triton.options.url) as client:
        yield client


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(("model", "body", "expected", "words"), ROWS)
def test_only_a_model_that_ran_has_failed(
    client: httpx.Client, model: str, body: str, expected: tuple[int, str], words: str, verb: str
) -> None:
    response = client.post(f"/v2/models/{model}/{verb}", content=body)
    document = response.text.removeprefix("data: ")
    response = httpx.Response(response.status_code, headers=response.headers, text=document)
    assert_error(response, *expected, words)


def test_setting_that_triton_refuses_is_the_fault_of_the_request(client: httpx.Client) -> None:
    response = client.post("/v2/logging", json={"log_format": "loud"})
    assert_error(response, *MALFORMED, "--log_format")
