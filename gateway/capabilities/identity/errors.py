"""Errors of tokens and certificates that do not identify a caller. No message contains the token."""

from __future__ import annotations

from gateway.errors import Forbidden, Unauthenticated, Unavailable


class CredentialsRequired(Unauthenticated):
    def __init__(self, *, token: bool, certificate: bool) -> None:
        kinds = ["a key", *["a token"] * token, *["a client certificate"] * certificate]
        bearer = "KEY_OR_TOKEN" if token else "KEY"
        super().__init__(
            f"{' or '.join(kinds)} is required: send Authorization: Bearer {bearer} or X-API-Key: KEY"
        )


class NamelessCertificate(Unauthenticated):
    message = (
        "the client certificate has no subject alternative name that is a URI, a DNS name or an e-mail "
        "address; use a certificate with one, or send a key"
    )


class ExpiredCertificate(Unauthenticated):
    """An open connection keeps the certificate with which it began; this response closes it."""

    def __init__(self) -> None:
        super().__init__("the client certificate has expired; open a new connection")
        self.headers = {**(self.headers or {}), "Connection": "close"}


class CrossOriginCertificate(Forbidden):
    """A browser sends an installed certificate with the requests of every page, like a cookie."""

    def __init__(self, *, token: bool) -> None:
        super().__init__(
            "a web page of another origin sent this with the browser's certificate; send a key"
            + " or a token" * token
        )


class InvalidToken(Unauthenticated):
    """RFC 6750, section 3.1. The argument says what is wrong, such as `has expired`."""

    challenge = 'Bearer error="invalid_token"'

    def __init__(self, problem: str) -> None:
        super().__init__(f"the token {problem}")


class IssuerUnavailable(Unavailable):
    """The issuer's keys are not known, so that nobody can tell whether the token is valid."""

    code = "ISSUER_UNAVAILABLE"
    retry_after_s = 10
    message = (
        "the token cannot be checked, because the keys of its issuer could not be fetched; try "
        "again later"
    )


class NoMatchingRule(Forbidden):
    def __init__(self, credentials: str, rules: str) -> None:
        super().__init__(f"the {credentials} matches no entry of '{rules}' in the keys file")
