"""One replica's management API over gRPC: a load over Triton's HTTP would stall everybody's inference.

A channel per call: an open one would be waited for by a Triton that stops, and loads are rare.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import orjson
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed, GatewayError, Malformed
from gateway.triton.complaints import Asked, refusal
from gateway.triton.http import MOST_DOCUMENT_BYTES
from gateway.triton.wire import NotSent

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 2.0
# The HTTP status that Triton's HTTP API has for the same code; the rest is 400 there as well.
STATUSES: Final = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
UNREACHABLE: Final = re.compile(
    r"failed to connect|connection (?:refused|reset|closed|attempt timed out)|socket closed|"
    r"recvmsg|endpoint read failed|name resolution|dns resolution|tls handshake|handshak",
    re.I,
)
FILE: Final = "file:"
Metadata = Mapping[str, str] | None


@dataclass(frozen=True)
class Tls:
    """How an `https://` replica is trusted, and how the gateway shows itself to it."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class NoGrpc(NotSent):
    """Nobody answers at the gRPC port."""


async def load(
    address: str,
    model: str,
    parameters: Mapping[str, Any],
    timeout_s: float,
    tls: Tls | None,
    metadata: Metadata = None,
) -> None:
    """Load a model; returns when Triton has. Raises `NoGrpc`, `DeadlinePassed` or Triton's reason."""
    config, files = uploaded(parameters)
    async with client(address, Asked(model, timeout_s=timeout_s), tls, "load") as triton:
        await triton.load_model(
            model, config=config, files=files, client_timeout=timeout_s, headers=metadata
        )


async def unload(
    address: str,
    model: str,
    unload_dependents: bool,
    timeout_s: float,
    tls: Tls | None,
    metadata: Metadata = None,
) -> None:
    """Ask for an unload; Triton answers before it is done. Raises as `load` does."""
    async with client(address, Asked(model, timeout_s=timeout_s), tls, "unload") as triton:
        await triton.unload_model(
            model,
            unload_dependents=unload_dependents,
            client_timeout=timeout_s,
            headers=metadata,
        )


def uploaded(parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes] | None]:
    """The config and files that a load brings, as Triton's gRPC API takes them. Raises `Malformed`."""
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        config = orjson.dumps(config).decode()
    files = {}
    for name, content in parameters.items():
        if name.startswith(FILE):
            try:
                files[name] = base64.b64decode(str(content), validate=True)
            except (binascii.Error, ValueError):
                raise Malformed(f"the content of {name!r} is not base64") from None
    return config, files or None


@asynccontextmanager
async def client(
    address: str, asked: Asked, tls: Tls | None, verb: str
) -> AsyncIterator[InferenceServerClient]:
    """A connected client; what goes wrong inside leaves as an error of ours."""
    options = channel_options(MOST_DOCUMENT_BYTES)
    triton = InferenceServerClient(address, channel_args=options, **secured(tls))
    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            await triton.is_server_live()
        yield triton
    except TimeoutError:
        raise NoGrpc(f"nobody answers gRPC at {address}", refused=False) from None
    except InferenceServerException as exc:
        raise translated(exc, address, asked, verb) from exc
    finally:
        await triton.close()


def channel_options(max_answer_bytes: int) -> list[tuple[str, int]]:
    """The most bytes of one message that comes; what is sent has its own limits."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", max_answer_bytes),
    ]


def secured(tls: Tls | None) -> dict[str, Any]:
    """As tritonclient's gRPC client takes it."""
    if tls is None:
        return {}
    return {
        "ssl": True,
        "root_certificates": tls.ca_file and str(tls.ca_file),
        "private_key": tls.key_file and str(tls.key_file),
        "certificate_chain": tls.cert_file and str(tls.cert_file),
    }


def translated(
    exc: InferenceServerException, address: str, asked: Asked, verb: str
) -> GatewayError:
    code = str(exc.status()).removeprefix("StatusCode.")
    message = str(exc.message())
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(asked.timeout_s)
    if code == "UNAVAILABLE" and UNREACHABLE.search(message):
        return NoGrpc(f"nobody answers gRPC at {address}")
    body = orjson.dumps({"error": message})
    return refusal(STATUSES.get(code, 400), body, asked.model, verb)
