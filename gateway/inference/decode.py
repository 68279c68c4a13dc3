"""Decoding of bodies to tensors: on the event loop if that is short, else in a thread or a process.

A process can be killed, and does not hold the GIL of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar

from gateway.errors import MalformedRequest
from gateway.inference.pipeline import OpenedRequest
from gateway.tensors.codecs import JSON_CODEC, NPY_CODEC, Codec, parse_body_type, read_bytes
from gateway.tensors.images import CostlyImages, is_image
from gateway.tensors.inputs import (
    Body,
    DecodedBody,
    InferInputs,
    JsonParser,
    decode_body,
    decode_json_body,
    to_inputs,
)
from gateway.tensors.multipart import Form
from gateway.tensors.npy import NPY_MAGIC
from gateway.tensors.payload import Payload, PayloadLimits
from gateway.tensors.signature import Signature

T = TypeVar("T")
# The files of a form are copied once.
MAX_INLINE_FORM_BYTES: Final = 1 << 20
# A thread cannot be stopped. Pillow needs up to half a second for a mebibyte of metadata.
MAX_THREAD_IMAGE_BYTES: Final = 2 << 20
MAX_THREAD_COST_PIXELS: Final = 4_000_000
# Each row of a model without batching becomes an inference of its own.
MAX_INLINE_ROWS_BYTES: Final = 1 << 10
MAX_INLINE_PAYLOADS: Final = 32


class Place(Enum):
    LOOP = auto()
    THREAD = auto()
    PROCESS = auto()


def choose_place(body: Body, content_type: str, signature: Signature) -> Place:
    """Return where a body is decoded, by its type and size, and by what the model accepts."""
    if isinstance(body, Form):
        return choose_form_place(body, signature)
    codec = parse_body_type(content_type).codec
    if codec is None:
        return Place.LOOP  # which raises the error of a type that is not supported
    if codec.read_value is read_bytes:
        if signature.accepts_only_bytes:
            return Place.LOOP  # the body is an element as it is
        if not body.startswith(NPY_MAGIC):
            may_be_image = signature.accepts_images and is_image(body)
            return choose_image_place(len(body)) if may_be_image else Place.LOOP
        codec = NPY_CODEC
    place = choose_codec_place(codec, len(body))
    # A small text or JSON can contain an image.
    may_have_images = signature.accepts_images and codec is not NPY_CODEC
    return Place.THREAD if place is Place.LOOP and may_have_images else place


def choose_form_place(form: Form, signature: Signature) -> Place:
    place = choose_codec_place(JSON_CODEC, form.decoded_bytes)
    if place is Place.PROCESS:
        return place
    if signature.accepts_images:
        return choose_image_place(form.file_bytes)
    return Place.THREAD if form.file_bytes > MAX_INLINE_FORM_BYTES else place


def choose_image_place(size_bytes: int) -> Place:
    return Place.THREAD if size_bytes <= MAX_THREAD_IMAGE_BYTES else Place.PROCESS


def choose_codec_place(codec: Codec, size_bytes: int) -> Place:
    if size_bytes <= codec.max_inline_bytes:
        return Place.LOOP
    return Place.THREAD if size_bytes <= codec.max_thread_bytes else Place.PROCESS


async def decode(opened: OpenedRequest, body: Body) -> DecodedBody:
    """Return the input tensors of a body. Raises the errors of `decode_body`, or `DeadlinePassed`."""
    content_type = opened.body.content_type
    signature = opened.signature
    place = choose_place(body, content_type, signature)
    try:
        if place is Place.LOOP:
            return decode_body(body, content_type, signature, opened.services.payload_limits)
        decoded = await run_in_place(opened, place, decode_body, body, content_type, signature)
    except MalformedRequest as exc:
        sent_type = opened.body.get_header(b"content-type") or ""
        if signature.takes_bytes_alone and sent_type != content_type:
            advice = "if it is a text, send it with -H 'Content-Type: text/plain'"
            raise MalformedRequest(f"{exc.detail}; {advice}") from exc
        raise
    charge_growth(opened, [decoded.inputs])
    return decoded


async def decode_json(opened: OpenedRequest, body: bytes, parse: JsonParser) -> list[InferInputs]:
    """Return the input tensors of each inference of a JSON body of another API."""
    signature = opened.signature
    place = choose_place(body, JSON_CODEC.media_type, signature)
    if len(body) > MAX_INLINE_ROWS_BYTES and not signature.supports_batching:
        place = Place.THREAD if place is Place.LOOP else place
    content_type = opened.body.content_type  # whatever it is, the document is JSON
    inputs = await run_in_place(
        opened, place, decode_json_body, parse, body, content_type, signature
    )
    if place is not Place.LOOP:
        charge_growth(opened, inputs)
    return inputs


async def convert_payloads(
    opened: OpenedRequest, payloads: Sequence[Payload], size_bytes: int
) -> list[InferInputs]:
    """Return the input tensors of payloads of texts, which together have this size."""
    is_small = len(payloads) <= MAX_INLINE_PAYLOADS and size_bytes <= JSON_CODEC.max_inline_bytes
    place = Place.LOOP if is_small else Place.THREAD
    return await run_in_place(opened, place, convert_all, payloads, opened.signature)


def convert_all(
    payloads: Sequence[Payload], signature: Signature, limits: PayloadLimits
) -> list[InferInputs]:
    return [to_inputs(payload, signature, limits) for payload in payloads]


async def run_in_place(
    opened: OpenedRequest, place: Place, function: Callable[..., T], *arguments: Any
) -> T:
    """Call the function with the limits of the payload as its last argument, until the deadline."""
    limits = opened.services.payload_limits
    if place is Place.LOOP:
        return function(*arguments, limits)
    executor = opened.services.decode_executor
    if place is Place.THREAD:
        cheap = replace(limits, max_cost_pixels=MAX_THREAD_COST_PIXELS)
        try:
            return await opened.deadline.limit(
                executor.run_in_thread(partial(function, *arguments, cheap))
            )
        except CostlyImages:
            pass  # known only now, from the headers of the images
    return await opened.deadline.limit(executor.run_in_process(function, *arguments, limits))


def charge_growth(opened: OpenedRequest, inputs_list: Sequence[InferInputs]) -> None:
    """Charge tensors that need more memory than the body was charged for: images and archives are small."""
    missing_bytes = sum(inputs.size_bytes for inputs in inputs_list) - opened.charge.held_bytes
    if missing_bytes > 0:
        opened.charge.add(missing_bytes)
