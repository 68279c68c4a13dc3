"""Inferences of groups of inputs, and records of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.client import AsyncClient, Body, GatewayError, InferResult
from gateway.client.calls import InferCall
from gateway.client.errors import CONNECTION_LOST, INVALID_RESPONSE, TIMEOUT, UNREACHABLE
from gateway.client.many import infer_batch
from gateway.commands.errors import translate_hints
from gateway.commands.inference.inputs import Input
from gateway.commands.inference.records import Record
from gateway.commands.target import make_command_error
from gateway.media_types import UTF8_TEXT

# The request was sent, without a complete and valid response: the inference may have run.
NO_RESPONSE_CODES = (CONNECTION_LOST, INVALID_RESPONSE, TIMEOUT)


@dataclass(frozen=True)
class GroupInference:
    """Sends groups of inputs to a model."""

    client: AsyncClient
    model: str
    version: str
    is_decoupled: bool

    async def infer(self, group: Sequence[Input]) -> list[Record]:
        """Send the inputs in one request, or one for each; return a record for each input, in order.

        Raises `GatewayUnreachable`.
        """
        bodies = [await read_input(input_) for input_ in group]
        readable = [body for body in bodies if not isinstance(body, GatewayError)]
        call = InferCall(self.model, version=self.version)
        outcomes = iter(await infer_batch(self._infer_one, call, readable))
        return [
            make_record(input_.name, body if isinstance(body, GatewayError) else next(outcomes))
            for input_, body in zip(group, bodies, strict=True)
        ]

    async def _infer_one(self, call: InferCall) -> InferResult:
        if not self.is_decoupled:
            return await self.client.infer(call.model, call.value, version=call.version)
        results = self.client.stream(call.model, call.value, version=call.version)
        return collect_results([result async for result in results])


async def read_input(input_: Input) -> Any:
    """Return the value of an input for the client, or the error that reading it is."""
    try:
        return to_value(await input_.read_async())
    except OSError as exc:
        return GatewayError(f"the file cannot be read: {exc.strerror}", "UNREADABLE")


def to_value(body: Body) -> str | Body:
    """Return a text, which can be in a batch, or the body as it is."""
    if body.content_type == UTF8_TEXT:
        try:
            return body.content.decode()
        except UnicodeDecodeError:
            pass  # the gateway reports the error
    return body


def collect_results(results: Sequence[InferResult]) -> InferResult:
    """Return each output's values over all responses, in order."""
    outputs: dict[str, list[Any]] = {}
    for result in results:
        for name, value in result.items():
            outputs.setdefault(name, []).append(value)
    return InferResult(outputs)


def make_record(name: str, outcome: InferResult | GatewayError) -> Record:
    if isinstance(outcome, InferResult):
        return Record(name, dict(outcome))
    if outcome.code == UNREACHABLE:
        raise make_command_error(outcome)
    code = "NO_ANSWER" if outcome.code in NO_RESPONSE_CODES else outcome.code
    return Record(name, error=translate_hints(str(outcome)), code=code)
