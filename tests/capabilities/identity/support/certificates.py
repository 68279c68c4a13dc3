"""Client certificates with any subject alternative names, signed by an authority of trustme."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

KINDS: dict[str, Any] = {
    "URI": x509.UniformResourceIdentifier,
    "DNS": x509.DNSName,
    "email": x509.RFC822Name,
}


def write_client_certificate(
    authority: trustme.CA, folder: Path, *names: tuple[str, str]
) -> tuple[Path, Path]:
    """Write a certificate with these names and its key; return their paths."""
    signer: Any = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "client")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names:
        general = [KINDS[kind](name) for kind, name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    label = "-".join("".join(filter(str.isalnum, name)) for _, name in names) or "nameless"
    cert_file = folder / f"{label}.pem"
    key_file = folder / f"{label}.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file
