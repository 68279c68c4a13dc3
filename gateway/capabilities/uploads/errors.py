"""The errors of uploads, downloads and removals of models."""

from __future__ import annotations

from gateway.errors import GatewayError, UnsupportedBody


class RepositoryNotConfigured(GatewayError):
    status, code = 501, "NO_REPOSITORY"
    message = (
        "this gateway stores no model files; to upload models, set GATEWAY_REPOSITORY to the folder or "
        "bucket that the Tritons read, file:///FOLDER or s3://BUCKET, and GATEWAY_MODEL_UPLOADS"
    )


class UnsupportedUploadEncoding(GatewayError):
    """The body of an upload is compressed, so that its checksum would be ambiguous."""

    status, code = UnsupportedBody.status, UnsupportedBody.code
    message = (
        "an upload must not have a Content-Encoding; send the file unchanged, or in an archive"
    )


class InvalidModelFile(GatewayError):
    """An uploaded file is not a model, or its config does not match it."""

    status, code = 422, "INVALID_MODEL_FILE"


class DigestMismatch(GatewayError):
    """The received body does not have the announced checksum."""

    status, code = 400, "DIGEST_MISMATCH"
    message = "the received body does not have the SHA-256 digest of its header; send it again"


class RepositoryFull(GatewayError):
    status, code = 507, "REPOSITORY_FULL"


class RepositoryUnavailable(GatewayError):
    """The folder or bucket of the models cannot be read or written."""

    status, code, retry_after_s = 503, "REPOSITORY_UNAVAILABLE", 1

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model repository cannot be used: {reason}")
