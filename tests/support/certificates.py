"""Certificates of a test's own authority, and a server that shows one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trustme

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def write_pair(authority: trustme.CA, folder: Path, name: str = "127.0.0.1") -> None:
    pair = authority.issue_cert(name, "127.0.0.1")
    for path, blob in (
        (folder / "key.pem", pair.private_key_pem.bytes()),
        (folder / "cert.pem", b"".join(each.bytes() for each in pair.cert_chain_pems)),
    ):
        path.with_suffix(".new").write_bytes(blob)
        path.with_suffix(".new").replace(path)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def server_context(authority: trustme.CA, *, name: str, wants_client: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    if wants_client:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@asynccontextmanager
async def serving(context: ssl.SSLContext, body: bytes = b"hello") -> AsyncIterator[str]:
    """Answer every request over this TLS with the body, and yield the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD % len(body) + body)
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
