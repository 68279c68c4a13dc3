"""The body of an upload: a file, or a form with files, written to temporary files as it arrives."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.capabilities.uploads.model_files.staging import StagedFile, StagedWriter, Staging
from gateway.capacity.archives import is_safe_segment
from gateway.errors import MalformedRequest
from gateway.headers import decode_header_text, parse_header_parameters
from gateway.messages import join_names, quote_text
from gateway.tensors.multipart import PartReader

MODEL_FIELD: Final = "model"
CONFIG_FIELD: Final = "config"
LABELS_FIELD: Final = "labels"
FORM_FIELDS: Final = (MODEL_FIELD, CONFIG_FIELD, LABELS_FIELD)
MAX_FORM_PARTS: Final = 128
SHA256_BYTES: Final = 32
# An item of a structured dictionary (RFC 8941) with a byte sequence as its value.
SHA256_ITEM: Final = re.compile(r"(?:^|,)[ \t]*sha-256=:([A-Za-z0-9+/=]*):")


@dataclass(frozen=True)
class ReceivedFile:
    """A file of an upload, and the field of the form that contains it."""

    field: str
    name: str  # empty if the client sent none
    content: StagedFile


@dataclass(frozen=True)
class FormPart:
    """A field of the form that contains a file, and the file as it is written."""

    field: str
    file_name: str
    writer: StagedWriter


class FileBody:
    """A body that is one file. After `finish`, `digest` is the SHA-256 digest of all of it."""

    def __init__(self, staging: Staging, file_name: str) -> None:
        self._writer = staging.create_file()
        self._file_name = clean_file_name(file_name)
        self.digest = b""

    def feed(self, data: bytes) -> None:
        self._writer.write(data)

    def finish(self) -> list[ReceivedFile]:
        content = self._writer.finish()
        self.digest = bytes.fromhex(content.sha256)
        return [ReceivedFile(MODEL_FIELD, self._file_name, content)]


class FormBody:
    """A body of the type multipart/form-data, with the same methods."""

    def __init__(self, staging: Staging, content_type: str) -> None:
        self._staging = staging
        self._parser = PartReader(content_type, MAX_FORM_PARTS)
        self._hash = hashlib.sha256()
        self._part: FormPart | None = None
        self._files: list[ReceivedFile] = []

    def feed(self, data: bytes) -> None:
        self._hash.update(data)
        for part in self._parser.feed(data):
            self._write(part.headers, part.content)
            self._end_part()
        if (headers := self._parser.part_headers) is not None:
            self._write(headers, self._parser.take_partial_content())

    def _write(self, headers: Mapping[str, str], content: bytes) -> None:
        if self._part is None:
            options = parse_part_options(headers)
            file_name = clean_file_name(decode_header_text(options.get("filename", "")))
            self._part = FormPart(options["name"], file_name, self._staging.create_file())
        self._part.writer.write(content)

    def _end_part(self) -> None:
        if self._part is not None:
            part = self._part
            self._files.append(ReceivedFile(part.field, part.file_name, part.writer.finish()))
            self._part = None

    def finish(self) -> list[ReceivedFile]:
        self._parser.finish()
        return self._files

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


ReceivedBody = FileBody | FormBody


def parse_part_options(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options of a part with a known `name`. Raises `MalformedRequest`."""
    disposition, options = parse_header_parameters(headers.get("content-disposition", ""))
    name = options.get("name", "")
    if disposition != "form-data" or name not in FORM_FIELDS:
        raise MalformedRequest(
            f"the form has a field {quote_text(name)}; the fields of an upload are {join_names(FORM_FIELDS)}"
        )
    return options


def clean_file_name(name: str) -> str:
    """Return the name without its folders. Raises `MalformedRequest` for an unusual one."""
    name = name.replace("\\", "/").rpartition("/")[2]
    if name and not is_safe_segment(name):
        raise MalformedRequest(f"{quote_text(name)} is not a valid file name")
    return name


def parse_sha256_digest(header: str) -> bytes:
    """Return the SHA-256 digest of a `Repr-Digest` (RFC 9530). Raises `MalformedRequest` without one."""
    found = SHA256_ITEM.findall(header)
    try:
        digest = base64.b64decode(found[-1], validate=True) if found else b""
    except binascii.Error:
        digest = b""
    if len(digest) != SHA256_BYTES:
        raise MalformedRequest("Repr-Digest must contain sha-256=:BASE64: with 32 bytes in base64")
    return digest
