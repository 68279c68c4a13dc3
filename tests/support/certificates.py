"""Certificates of a test's own authority."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


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
