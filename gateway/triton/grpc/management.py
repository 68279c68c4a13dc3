"""A replica's management API over gRPC, because a load over Triton's HTTP stalls all inference.

Each call has its own channel: Triton's shutdown waits for open ones, and loads are rare.
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

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    MalformedRequest,
    UpstreamResponseTooLarge,
)
from gateway.http_client.connection import RequestNotSent
from gateway.triton.error_mapping import RequestTarget, map_load_error, map_triton_error
from gateway.triton.response import MAX_METADATA_BYTES

log = logging.getLogger(__name__)

GRPC_CONNECT_TIMEOUT_S: Final = 2.0
# The status that Triton's HTTP API returns for each code; all other codes are 400.
HTTP_STATUS_BY_GRPC_CODE: Final = {
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "UNIMPLEMENTED": 501,
}
UNREACHABLE_MESSAGE: Final = re.compile(
    r"failed to connect|errors resolving |connection (?:refused|reset|closed|attempt timed out)|"
    r"socket closed|recvmsg|endpoint read failed|name resolution|dns resolution|tls handshake|handshak",
    re.I,
)
# Prefixes of gRPC's own messages, because a model's messages may contain the same words.
NOT_SENT_MESSAGE: Final = re.compile(
    r"failed to connect|connections to all backends|errors resolving |dns resolution|"
    r"name resolution|empty address",
    re.I,
)
TOO_LARGE_MESSAGE: Final = re.compile(
    r"(?:stream removed \()?(?:client: )?(?:received|decompressed) message larger than max", re.I
)
CUT_OFF_MESSAGE: Final = re.compile(
    r"stream removed|socket closed|recvmsg|endpoint|connection (?:reset|closed)|broken pipe|goaway",
    re.I,
)
FILE_PARAMETER_PREFIX: Final = "file:"
GrpcMetadata = Mapping[str, str] | None


@dataclass(frozen=True)
class GrpcTlsFiles:
    """The CA file for `https://` replicas, and the gateway's client certificate and key."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class GrpcUnreachable(RequestNotSent):
    """The gRPC port does not respond."""


async def load_model_via_grpc(
    address: str,
    model: str,
    parameters: Mapping[str, Any],
    timeout_s: float,
    tls: GrpcTlsFiles | None,
    metadata: GrpcMetadata = None,
) -> None:
    """Load a model and wait. Raises `GrpcUnreachable`, `DeadlinePassed` or Triton's error."""
    config, files = parse_load_parameters(parameters)
    async with open_management_client(
        address, RequestTarget(model, timeout_s=timeout_s), tls, "load"
    ) as triton:
        await triton.load_model(
            model, config=config, files=files, client_timeout=timeout_s, headers=metadata
        )


async def unload_model_via_grpc(
    address: str,
    model: str,
    unload_dependents: bool,
    timeout_s: float,
    tls: GrpcTlsFiles | None,
    metadata: GrpcMetadata = None,
) -> None:
    """Request an unload; Triton responds before it is complete. Raises the same errors as a load."""
    async with open_management_client(
        address, RequestTarget(model, timeout_s=timeout_s), tls, "unload"
    ) as triton:
        await triton.unload_model(
            model,
            unload_dependents=unload_dependents,
            client_timeout=timeout_s,
            headers=metadata,
        )


def parse_load_parameters(
    parameters: Mapping[str, Any],
) -> tuple[str | None, dict[str, bytes] | None]:
    """Return the config and files for Triton's gRPC API. Raises `MalformedRequest`."""
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        config = orjson.dumps(config).decode()
    files = {}
    for name, content in parameters.items():
        if name.startswith(FILE_PARAMETER_PREFIX):
            try:
                files[name] = base64.b64decode(str(content), validate=True)
            except (binascii.Error, ValueError):
                raise MalformedRequest(f"the content of {name!r} is not valid base64") from None
    return config, files or None


@asynccontextmanager
async def open_management_client(
    address: str, target: RequestTarget, tls: GrpcTlsFiles | None, verb: str
) -> AsyncIterator[InferenceServerClient]:
    """Yield a connected client; errors inside the block become gateway errors."""
    options = channel_options(MAX_METADATA_BYTES)
    triton = InferenceServerClient(address, channel_args=options, **build_tls_arguments(tls))
    try:
        with anyio.fail_after(GRPC_CONNECT_TIMEOUT_S):
            await triton.is_server_live()
        yield triton
    except TimeoutError:
        raise GrpcUnreachable(f"no gRPC response from {address}", is_refused=False) from None
    except InferenceServerException as exc:
        raise map_management_error(exc, address, target, verb) from exc
    finally:
        await triton.close()


def channel_options(max_answer_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),  # requests have their own limits
        ("grpc.max_receive_message_length", max_answer_bytes),
    ]


def build_tls_arguments(tls: GrpcTlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl": True,
        "root_certificates": tls.ca_file and str(tls.ca_file),
        "private_key": tls.key_file and str(tls.key_file),
        "certificate_chain": tls.cert_file and str(tls.cert_file),
    }


def map_management_error(
    exc: InferenceServerException, address: str, target: RequestTarget, verb: str
) -> GatewayError:
    code = str(exc.status()).removeprefix("StatusCode.")
    message = str(exc.message())
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(target.timeout_s)
    if code == "UNAVAILABLE" and UNREACHABLE_MESSAGE.search(message):
        return GrpcUnreachable(f"cannot connect to gRPC at {address}")
    return map_load_error(
        HTTP_STATUS_BY_GRPC_CODE.get(code, 400), encode_triton_error(message), target.model, verb
    )


def map_grpc_error(
    code: str, details: str, target: RequestTarget, max_answer_bytes: int
) -> GatewayError:
    if code == "RESOURCE_EXHAUSTED" and TOO_LARGE_MESSAGE.match(details):
        return UpstreamResponseTooLarge(max_answer_bytes)
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(target.timeout_s)
    if code == "UNAVAILABLE" and NOT_SENT_MESSAGE.match(details):
        return GrpcUnreachable("no response from the replica's gRPC port", is_refused=False)
    if code == "UNAVAILABLE" and CUT_OFF_MESSAGE.match(details):
        return BadUpstream(
            "the replica closed its gRPC connection before its response was complete"
        )
    return map_triton_error(
        HTTP_STATUS_BY_GRPC_CODE.get(code, 400), encode_triton_error(details), target
    )


def encode_triton_error(message: str) -> bytes:
    return orjson.dumps({"error": message})
