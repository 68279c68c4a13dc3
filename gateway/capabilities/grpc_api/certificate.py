"""The certificate of the gRPC server, which is that of HTTPS, reloaded when its files change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from gateway.config_files import WatchedFile, check_regular_file
from gateway.messages import CommandError
from gateway.settings import ClientAuth, describe_os_errors, load_authority, load_certificate


class UnusableCertificate(CommandError):
    """The certificate or its key changed, and cannot be loaded."""


class GrpcCertificate:
    """A certificate chain and its key, in the form that gRPC takes."""

    def __init__(self, cert_file: Path, key_file: Path | None, client_ca_file: Path | None) -> None:
        self._key_file = key_file or cert_file
        self._client_ca_file = client_ca_file
        companions = filter(None, (self._key_file, client_ca_file))
        self._file: WatchedFile[Any] = WatchedFile(cert_file, self._load, *companions)

    def create_credentials(self) -> Any:
        return grpc.dynamic_ssl_server_credentials(
            self._file.value, self._reload_if_changed, self._client_ca_file is not None
        )

    def _reload_if_changed(self) -> Any:
        """Return the new certificate, or None to keep the previous one. gRPC asks for each handshake.

        With a client authority each handshake gets a configuration of its own, which knows no sessions: a
        resumed one would keep the rights of a certificate that has expired.
        """
        has_changed = self._file.reload_if_changed()
        return self._file.value if has_changed or self._client_ca_file is not None else None

    def _load(self, cert_file: Path) -> Any:
        with describe_os_errors(UnusableCertificate, f"the certificate {cert_file}"):
            for path in filter(None, (cert_file, self._key_file, self._client_ca_file)):
                check_regular_file(path.stat())
            # A pair that does not match would make gRPC refuse every connection.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            load_certificate(context, cert_file, self._key_file)
            pair = (self._key_file.read_bytes(), cert_file.read_bytes())
            client_ca = None
            if self._client_ca_file is not None:
                load_authority(context, self._client_ca_file, ClientAuth.required)
                client_ca = self._client_ca_file.read_bytes()
        return grpc.ssl_server_certificate_configuration((pair,), client_ca)
