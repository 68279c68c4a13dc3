"""Callers that are identified by tokens or certificates, and when keys expire."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from gateway.capabilities.capability import Attachment, Capability, SignIn
from gateway.capabilities.identity.rules import RULE_PARSERS
from gateway.capabilities.identity.settings import IdentitySettings
from gateway.config.settings import Settings
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.capabilities.identity.expiry import KeyExpiry
    from gateway.capabilities.identity.issuer import KeySource, TokenChecker
    from gateway.services import Services


def attach_identity(settings: Settings) -> Attachment | None:
    identity = settings.read(IdentitySettings)
    if settings.keys_file is None:
        if identity.oidc_issuer:
            raise CommandError(
                "GATEWAY_OIDC_ISSUER requires GATEWAY_KEYS_FILE, whose list 'oidc' gives tokens their rights"
            )
        return None
    asks_for_certificates = settings.tls_client_ca_file is not None
    tokens = create_token_checker(identity) if identity.oidc_issuer else None

    async def open_identity(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.identity.expiry import KeyExpiry

        def run(part: KeyExpiry | KeySource) -> None:
            services.metrics.collector_registry.register(part)
            stack.callback(asyncio.create_task(part.run()).cancel)

        access = services.access
        if access.keys_file is None:
            return
        run(KeyExpiry(access.keys_file, services.repository.state))
        if tokens is not None:
            run(tokens.source)
        if tokens is not None or asks_for_certificates:
            from gateway.capabilities.identity.verifier import IdentityVerifier

            verifier = IdentityVerifier(
                access.keys_file, tokens, asks_for_certificates=asks_for_certificates
            )
            access.verifiers.append(verifier)

    return Attachment(open=open_identity, sign_in=find_sign_in(identity))


def find_sign_in(settings: IdentitySettings) -> SignIn | None:
    client_id = settings.oidc_client_id
    return SignIn(settings.oidc_issuer, client_id) if client_id else None


def create_token_checker(settings: IdentitySettings) -> TokenChecker:
    try:
        from gateway.capabilities.identity.issuer import TokenChecker, open_key_source
        from gateway.capabilities.identity.tokens import TokenParser
    except ImportError as exc:
        if not str(exc.name).startswith(("joserfc", "cryptography")):
            raise
        raise CommandError(
            "GATEWAY_OIDC_ISSUER requires an extra: pip install 'triton-gateway[oidc]'"
        ) from None
    parser = TokenParser(settings.oidc_issuer, settings.oidc_audience)
    return TokenChecker(parser, open_key_source(settings))


CAPABILITY = Capability(
    "identity", attach_identity, settings=IdentitySettings, rule_parsers=RULE_PARSERS
)
