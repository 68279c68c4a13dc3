"""The kinds of model files: their backends, and how they are recognized by name and first bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.capabilities.uploads.errors import InvalidModelFile
from gateway.capabilities.uploads.model_files.staging import StagedFile
from gateway.messages import join_names, quote_text

HEAD_BYTES: Final = 4 << 10
GZIP_MAGIC: Final = b"\x1f\x8b"
TAR_MAGIC = b"ustar"
TAR_MAGIC_OFFSET = 257
ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
PLAN_MAGICS: Final = (b"ftrt", b"ptrt")
XML_STARTS: Final = (b"<?xml", b"<net")
# ONNX has no signature. A ModelProto (onnx.proto) begins with its ir_version, a small number, and the tag of
# another of its fields.
ONNX_START: Final = re.compile(rb"\x08[\x01-\x7f][\x12\x1a\x22\x28\x32\x3a\x42\x72\xa2\xca\xd2]")
# PyTorch's files are ZIP files; the position of these names in the first entries differs.
EXPORT_ENTRY = b"/archive_format"
TORCH_ENTRY = b"/data.pkl"
TORCH_HEAD_BYTES: Final = 1 << 10


@dataclass(frozen=True)
class FileKind:
    """A kind of model file and its name in a version folder.

    `is_data` means that its backend runs no code of the file.
    """

    backend: str
    file_name: str
    is_data: bool = False
    needs_config: bool = False  # Triton derives no config from the file


FILE_KINDS: Final[Mapping[str, FileKind]] = {
    ".onnx": FileKind("onnxruntime", "model.onnx", is_data=True),
    ".plan": FileKind("tensorrt", "model.plan", is_data=True),
    ".xml": FileKind("openvino", "model.xml", is_data=True),
    ".pt": FileKind("pytorch", "model.pt", needs_config=True),
    ".pt2": FileKind("pytorch", "model.pt2", needs_config=True),
    ".py": FileKind("python", "model.py", needs_config=True),
}
SUFFIX_ALIASES: Final = {".engine": ".plan", ".trt": ".plan", ".tgz": ".tar.gz"}
ARCHIVE_SUFFIXES: Final = (".zip", ".tar.gz", ".tar")
MODEL_SUFFIXES: Final = tuple(
    suffix for suffix, kind in FILE_KINDS.items() if kind.backend != "python"
)
DATA_BACKENDS: Final = tuple(kind.backend for kind in FILE_KINDS.values() if kind.is_data)
# Kinds whose first bytes are known.
VERIFIABLE_SUFFIXES: Final = (".onnx", ".xml", *ARCHIVE_SUFFIXES)


def find_suffix(file_name: str) -> str:
    """Return the suffix of a known kind of file or archive; empty for others."""
    name = file_name.lower()
    known = (*SUFFIX_ALIASES, *ARCHIVE_SUFFIXES, *FILE_KINDS)
    suffix = next((each for each in known if name.endswith(each)), "")
    return SUFFIX_ALIASES.get(suffix, suffix)


def identify_content(file: StagedFile) -> str:
    head = file.read_start(HEAD_BYTES)
    is_zip = head.startswith(ZIP_MAGICS)
    matches = {
        ".tar.gz": head.startswith(GZIP_MAGIC),
        ".tar": head[TAR_MAGIC_OFFSET:].startswith(TAR_MAGIC),
        ".pt2": is_zip and EXPORT_ENTRY in head[:TORCH_HEAD_BYTES],
        ".pt": is_zip and TORCH_ENTRY in head[:TORCH_HEAD_BYTES],
        ".zip": is_zip,
        ".plan": head.startswith(PLAN_MAGICS),
        ".xml": is_openvino_graph(head),
        ".onnx": ONNX_START.match(head) is not None,
    }
    return next((suffix for suffix, is_match in matches.items() if is_match), "")


def is_openvino_graph(head: bytes) -> bool:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(XML_STARTS) and b"<net " in start


def identify_file(file: StagedFile, file_name: str, backend: str = "") -> str:
    """Return the suffix of the file's kind, by its first bytes, its name and the declared backend.

    Raises `InvalidModelFile` if they contradict each other, or if the kind is unknown.
    """
    content = identify_content(file)
    named = find_suffix(file_name)
    if content == ".pt" and named == ".pt2":
        content = named
    if named and content and named != content:
        raise InvalidModelFile(
            f"the file is named {quote_text(file_name)}, but its content is that of a {content} file"
        )
    if named in VERIFIABLE_SUFFIXES and not content:
        raise InvalidModelFile(f"{quote_text(file_name)} is not a {named} file")
    if suffix := content or named:
        return suffix
    declared = (suffix for suffix, kind in FILE_KINDS.items() if kind.backend == backend)
    suffix = next(declared, "")
    if suffix and suffix not in VERIFIABLE_SUFFIXES:
        return suffix
    if not file.size:
        raise InvalidModelFile("the file is empty; send a model file, as curl -T FILE does")
    raise InvalidModelFile(
        "the file is not a model of a known kind, by its first bytes or its name; send one of "
        f"{join_names(MODEL_SUFFIXES)}, or a .zip or .tar.gz file of a model folder"
    )
