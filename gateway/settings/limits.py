"""Sizes, concurrency and timeouts of requests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationInfo, field_validator

from gateway.settings.values import PositiveSeconds


class LimitSettings(BaseModel):
    # Triton counts the bytes of texts in 32 bits, and needs 4 more for each text.
    max_body_bytes: int = Field(64 << 20, gt=0, le=1 << 30)
    """Maximum size of a request body, as received and decompressed; 1 GiB at most."""
    max_answer_bytes: int = Field(256 << 20, gt=0, lt=1 << 31)
    """Maximum size of a replica's response that /v1 buffers, over HTTP and gRPC; a larger response becomes a
    502. Responses that pass through /v2 may have any size."""
    max_bytes_in_flight: int = Field(0, ge=0)
    """Memory that the bodies of requests and responses may use together in each process; 0 means a quarter of
    the memory limit, divided among the workers. Further requests are rejected with 429."""
    max_image_pixels: int = Field(25_000_000, gt=0)
    """Maximum number of pixels of one image, and of all images of a request at the size that the model
    takes."""
    max_pixels_in_flight: int = Field(100_000_000, gt=0)
    """Maximum number of pixels that are decoded at the same time."""
    decode_threads: int = Field(0, ge=0)
    """Number of threads that decode images; 0 means one per core, four at most."""
    max_inflight: int = Field(2048, gt=0)
    """Maximum number of concurrent inferences in each process."""
    max_model_inflight: Literal["auto"] | NonNegativeInt = 0
    """Maximum number of concurrent inferences of one model; 0 means half of GATEWAY_MAX_INFLIGHT, and auto
    as many as keep Triton busy with a short queue of its own."""
    max_request_inferences: int = Field(2048, gt=0, le=1 << 16)
    """Maximum number of inferences of one request: the items for a model without a batch dimension, or the
    parts of a batch above the model's max_batch_size. Each counts as a request at the rate of the key."""
    max_queue: int = Field(512, ge=0)
    """Maximum number of inferences in the admission queue; further ones are rejected with 429 at once."""
    max_request_timeout_s: PositiveSeconds = 300.0
    """Maximum timeout that a client may set with X-Request-Timeout."""
    request_timeout_s: PositiveSeconds = Field(30.0, validate_default=True)
    """Timeout of a request if the client sets none."""

    @field_validator("max_model_inflight", mode="before")
    @classmethod
    def check_model_limit(cls, value: object) -> object:
        if value == "auto" or str(value).isdecimal():
            return value
        raise ValueError("use a number from 0, or auto")

    @field_validator("request_timeout_s")
    @classmethod
    def check_request_timeout(cls, value: float, info: ValidationInfo) -> float:
        maximum: float = info.data.get("max_request_timeout_s", value)
        if value > maximum and value == cls.model_fields["request_timeout_s"].default:
            return maximum  # the default adapts to a lower maximum
        if value > maximum:
            raise ValueError(f"it exceeds GATEWAY_MAX_REQUEST_TIMEOUT_S, which is {maximum:g}")
        return value
