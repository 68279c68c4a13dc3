"""Embeddings and reranking: OpenAI's own client, and models of other kinds, on real tritonservers."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.openai.support.lazy import LazyModule
from tests.support.keys import ADMIN, ENTRIES, INFER, bearer, entry, written
from tests.support.keys import TEXTS as TEXTS_KEY
from tests.support.missing import format_reason
from tests.support.model_zoo.zoo import Zoo, any_names
from tests.support.servers import ROOT, gateway_before

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "text_ensemble"
TEXTS = ["a cat sleeps", "a dog barks", "the stock market fell"]


@pytest.fixture(scope="module")
def client(demo: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0)


def embed(zoo: Zoo, name: str, **document: Any) -> httpx.Response:
    zoo.load(name)
    return zoo.client.post("/v1/embeddings", json={"model": zoo.names.model(name), **document})


def vectors_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    document = response.json()
    assert [item["index"] for item in document["data"]] == list(range(len(document["data"])))
    return [item["embedding"] for item in document["data"]]


@pytest.mark.long
def test_openais_client_gets_the_vectors_that_infer_gives(
    client: openai.OpenAI, demo: httpx.Client
) -> None:
    response = client.embeddings.create(model=MODEL, input=TEXTS)  # base64, the client's default
    as_numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    inferred = demo.post(f"/v1/models/{MODEL}/infer", json={"inputs": TEXTS}).json()
    expected = np.array(inferred["outputs"]["EMBEDDING"], np.float32)
    assert (response.object, response.model, len(response.data)) == ("list", MODEL, len(TEXTS))
    assert np.array_equal(np.array([each.embedding for each in response.data], "f4"), expected)
    assert np.array_equal(np.array([each.embedding for each in as_numbers.data], "f4"), expected)


def test_openais_client_lists_and_describes_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "triton")


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="nobody", input="a text")
    assert unknown.value.code == "MODEL_NOT_FOUND"
    with pytest.raises(openai.UnprocessableEntityError, match="does not support embeddings"):
        client.embeddings.create(model="text_core", input="a text")
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model=MODEL, input=[1, 2, 3])


@any_names
def test_batch_larger_than_the_models_keeps_its_order(zoo: Zoo) -> None:
    texts = ["x" * (number % 10) for number in range(2048)]
    found = vectors_of(embed(zoo, "vectors", input=texts))
    assert found == [[-(len(text) + n) for n in range(1, 5)] for text in texts]


def test_vectors_are_what_the_request_asks_for(zoo: Zoo) -> None:
    rows: tuple[tuple[str, dict[str, Any], Any], ...] = (
        ("vectors", {"input": "ab"}, [[-3, -4, -5, -6]]),
        ("plain_vectors", {"input": ["ab", ""]}, [[3, 4, 5, 6], [1, 2, 3, 4]]),
        ("vectors", {"input": "ab", "dimensions": 4}, [[-3, -4, -5, -6]]),
        ("vectors", {"input": "ab", "dimensions": 2}, [[pytest.approx(-0.6), pytest.approx(-0.8)]]),
        # Read in a thread and in a process.
        *(("vectors", {"input": "x" * n}, [[-n - 1, -n - 2, -n - 3, -n - 4]]) for n in (10**5, 2 * 10**6)),
    )  # fmt: skip
    for model, document, expected in rows:
        assert vectors_of(embed(zoo, model, **document)) == expected
    (encoded,) = vectors_of(embed(zoo, "vectors", input="ab", encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == [-3, -4, -5, -6]


@pytest.mark.parametrize(
    ("model", "document", "status", "words"),
    [
        ("token_vectors", {"input": "ab"}, 500, "not one vector for each text"),
        ("vectors", {"input": "a" * 13}, 500, "NaN or infinity"),
        ("relevance", {"input": "ab"}, 422, "does not support embeddings"),
        ("vectors", {"input": []}, 400, "non-empty list"),
        ("vectors", {"input": ["a"] * 2049}, 413, "at most 2048"),
        ("vectors", {"input": "a", "model": "../x"}, 404, "unknown model"),
    ],
)
def test_invalid_embeddings_request_is_refused_in_openais_format(
    zoo: Zoo, model: str, document: dict[str, Any], status: int, words: str
) -> None:
    response = embed(zoo, model, **document)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.status_code == status
    assert words in error["message"]


def rank(zoo: Zoo, **document: Any) -> httpx.Response:
    zoo.load("relevance")
    return zoo.client.post(
        "/v1/rerank", json={"model": zoo.names.model("relevance"), "query": "abc", **document}
    )


def test_documents_are_ranked_by_a_model_with_two_texts(zoo: Zoo) -> None:
    documents = ["xyz", "abc", {"text": "axx"}, "abx", "", "bca"]
    scores = [(1, 3.0), (5, 3.0), (3, 2.0), (2, 1.0), (0, 0.0), (4, 0.0)]
    for more, count in (({}, 6), ({"top_n": 4}, 4)):
        response = rank(zoo, documents=documents, **more)
        assert response.status_code == 200, response.text
        found = [(each["index"], each["relevance_score"]) for each in response.json()["results"]]
        assert found == scores[:count]
    for invalid, status in (({}, 400), ({"query": "q" * (1 << 20), "documents": ["d"] * 100}, 413)):
        assert rank(zoo, **invalid).status_code == status


# Clients with an environment of their own (`make clients`). Each prints the count of vectors and a length.

CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
CLIENT_PROGRAMS = {
    "langchain": """
from langchain_openai import OpenAIEmbeddings
client = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key="any", check_embedding_ctx_length=False)
vectors = client.embed_documents(TEXTS)
""",
    "llama-index": """
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
client = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key="any", embed_batch_size=2)
vectors = client.get_text_embedding_batch(TEXTS)
""",
    "litellm": """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
answer = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, api_base=URL, api_key="any")
vectors = [each["embedding"] for each in answer.data]
""",
}


@pytest.mark.skipif(
    not CLIENTS.exists(), reason=format_reason("the environment of other clients", "make clients")
)
@pytest.mark.parametrize("name", CLIENT_PROGRAMS)
def test_client_library_of_openais_api_works_unmodified(demo: httpx.Client, name: str) -> None:
    values = f"MODEL, URL, TEXTS = {MODEL!r}, '{demo.base_url}/v1', {TEXTS!r}\n"
    program = f"{values}{CLIENT_PROGRAMS[name]}print(len(vectors), len(vectors[0]))"
    ended = subprocess.run(
        [CLIENTS, "-c", program],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(len(TEXTS)), "384"]


def test_model_in_the_body_is_404_unless_the_key_sees_it(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    keys = written(tmp_path / "keys.yaml", ENTRIES)
    with gateway_before(demo_triton.options.url, keys_file=str(keys)) as client:
        for path, document in (
            ("/v1/embeddings", {"input": "a text"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):
            for key, model, status in (
                (TEXTS_KEY, "text_ensemble", 200 if path == "/v1/embeddings" else 422),
                (TEXTS_KEY, "ensemble", 404),
                (TEXTS_KEY, "text_nothing", 404),
                (ADMIN, "ensemble", 422),
            ):
                body = {"model": model, **document}
                answer = client.post(path, json=body, headers=bearer(key))
                assert answer.status_code == status, (path, key, model, answer.text)


@pytest.mark.fault("rows that are an inference each")
def test_rows_that_are_inferences_count_as_requests(
    zoo_triton: EmbeddedTriton, zoo_as_written: Zoo, tmp_path: Path
) -> None:
    zoo_as_written.load("plain_vectors")
    rate = entry(INFER, "infer", requests_per_second=1 / 3600)
    settings = {
        "keys_file": str(written(tmp_path / "keys.yaml", [rate, entry(ADMIN, "infer")])),
        "max_request_inferences": "5",
    }
    with gateway_before(zoo_triton.options.url, **settings) as client:

        def embed_rows(key: str, rows: int) -> httpx.Response:
            texts = ["a" * number for number in range(rows)]
            document = {"model": "plain_vectors", "input": texts}
            return client.post("/v1/embeddings", headers=bearer(key), json=document)

        assert embed_rows(ADMIN, 6).status_code == 413
        admitted = embed_rows(INFER, 5)
        assert [vector[0] for vector in vectors_of(admitted)] == [1, 2, 3, 4, 5]
        refused = embed_rows(INFER, 1)
        assert refused.status_code == 429, refused.text
        assert 4 * 3600 < int(refused.headers["retry-after"]) <= 5 * 3600
