"""OpenAI's client: models and embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from openai import OpenAI

from tests.clients.programs.outcomes import Call, Target, print_outcomes


def list_calls(target: Target) -> Iterator[Call]:
    client = OpenAI(base_url=f"http://{target.http}/v1", api_key=target.key, max_retries=0)

    def embed(form: Literal["float", "base64"]) -> Any:
        answer = client.embeddings.create(
            model="vectors", input=["one", "three"], encoding_format=form
        )
        return [each.embedding for each in answer.data]

    yield "models", lambda: sorted(model.id for model in client.models.list())
    yield "model", lambda: client.models.retrieve("vectors").id
    yield "embeddings float", lambda: embed("float")
    yield "embeddings base64", lambda: embed("base64")
    yield (
        "embeddings of unknown model",
        lambda: type(client.embeddings.create(model="unknown", input="one")),
    )
    yield "embeddings of nothing", lambda: client.embeddings.create(model="vectors", input=[])
    yield "close", client.close


if __name__ == "__main__":
    print_outcomes(list_calls)
