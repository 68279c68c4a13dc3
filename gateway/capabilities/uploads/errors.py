"""The errors of uploads, downloads and removals of models."""

from __future__ import annotations

from gateway.errors import GatewayError, UnsupportedBody


class RepositoryNotConfigured(GatewayError):
    status = 501
    code = "NO_REPOSITORY"
    message = (
        "this gateway stores no model files; to upload models, set GATEWAY_REPOSITORY to the folder or "
        "bucket that the Tritons read, file:///FOLDER or s3://BUCKET, and GATEWAY_MODEL_UPLOADS"
    )


class UnsupportedUploadEncoding(GatewayError):
    """The body of an upload is compressed, so that its checksum would be ambiguous."""

    status = UnsupportedBody.status
    code = UnsupportedBody.code
    message = (
        "an upload must not have a Content-Encoding; send the file unchanged, or in an archive"
    )


class InvalidModelFile(GatewayError):
    """An uploaded file is not a model, or its config does not match it."""

    status = 422
    code = "INVALID_MODEL_FILE"


class DigestMismatch(GatewayError):
    """The received body does not have the announced checksum."""

    status = 400
    code = "DIGEST_MISMATCH"
    message = "the received body does not have the SHA-256 digest of its header; send it again"


class RepositoryFull(GatewayError):
    status = 507
    code = "REPOSITORY_FULL"


class RepositoryUnavailable(GatewayError):
    """The folder or bucket of the models cannot be read or written."""

    status = 503
    code = "REPOSITORY_UNAVAILABLE"
    retry_after_s = 1

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model repository cannot be used: {reason}")
