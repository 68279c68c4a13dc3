"""Validation, tokenisation and padding of texts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

Rows = NDArray[np.int64]

# The first characters of a long text, enough for 256 tokens in most languages.
FIRST_PREFIX_CHARS = 4096


class ParameterError(ValueError):
    """A parameter is invalid; the message is for the user who loads the model."""


class TextError(ValueError):
    """A text is invalid; the message is for the client."""


@dataclass(frozen=True)
class Settings:
    """The parameters of config.pbtxt.

    Rows of ids have the length of the longest text in the request, rounded up to one of
    `padded_lengths` or `max_tokens`; longer texts are truncated to `max_tokens`.
    """

    tokenizer_file: str = "tokenizer.json"
    max_tokens: int = 256
    padded_lengths: tuple[int, ...] = ()
    max_text_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if Path(self.tokenizer_file).name != self.tokenizer_file:
            raise ParameterError("tokenizer_file must be a file name without a folder")
        if sorted(set(self.padded_lengths)) != list(self.padded_lengths):
            raise ParameterError("padded_lengths must be strictly increasing")
        if self.padded_lengths and self.padded_lengths[-1] > self.max_tokens:
            raise ParameterError(
                f"padded_lengths contains {self.padded_lengths[-1]}, "
                f"which is greater than max_tokens ({self.max_tokens})"
            )


def settings_of(model_config: Mapping[str, Any]) -> Settings:
    # The gateway's parameters contain a dot, and Triton's are upper case.
    given = {
        name: parameter["string_value"]
        for name, parameter in model_config.get("parameters", {}).items()
        if "." not in name and not name.isupper()
    }
    for name in given:
        if name not in READERS:
            raise ParameterError(
                f"unknown parameter {name}; valid parameters are {', '.join(READERS)}"
            )
    return Settings(**{name: READERS[name](name, text) for name, text in given.items()})


def whole_number(name: str, text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and int(text) > 0):
        raise ParameterError(f"{name} must be a positive integer, not {text!r}")
    return int(text)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(whole_number(name, part) for part in text.split(",")) if text.strip() else ()


READERS: dict[str, Callable[[str, str], Any]] = {
    "tokenizer_file": lambda _, text: text,
    "max_tokens": whole_number,
    "padded_lengths": whole_numbers,
    "max_text_bytes": whole_number,
}


class TextEncoder:
    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(folder / settings.tokenizer_file)
        self.pad_id: int = (self.tokenizer.padding or {}).get("pad_id", 0)
        min_tokens = self.tokenizer.num_special_tokens_to_add(False) + 1
        if settings.max_tokens < min_tokens:
            raise ParameterError(f"max_tokens must be at least {min_tokens} for this tokenizer")
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(settings.max_tokens)

    def rows(self, texts: Sequence[bytes]) -> tuple[Rows, Rows]:
        """Return `input_ids` and `attention_mask`, both [texts, length]; raise TextError."""
        strings = [self._decode(text, n, len(texts)) for n, text in enumerate(texts)]
        encodings = [self._encode(string) for string in strings]
        length = self.padded_length(max((len(encoding) for encoding in encodings), default=0))
        ids = np.full((len(encodings), length), self.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, encoding in enumerate(encodings):
            ids[row, : len(encoding)] = encoding.ids
            mask[row, : len(encoding)] = 1
        return ids, mask

    def padded_length(self, length: int) -> int:
        lengths = self.settings.padded_lengths
        if not lengths:
            return length
        return (*lengths, self.settings.max_tokens)[bisect_left(lengths, length)]

    def _decode(self, text: bytes, index: int, count: int) -> str:
        which = "the text" if count == 1 else f"text {index + 1} of {count}"
        limit = self.settings.max_text_bytes
        if len(text) > limit:
            raise TextError(f"{which} has {len(text)} bytes; the limit is {limit} bytes")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise TextError(f"{which} is not valid UTF-8 (at byte {error.start})") from None

    def _encode(self, text: str) -> Encoding:
        # To encode a megabyte for 256 tokens would be slow. The tokens of a prefix are those of the
        # whole text, except for the last word, which may be split: a prefix is sufficient if the row
        # is full before that word.
        size = FIRST_PREFIX_CHARS
        while size < len(text):
            prefix = self.tokenizer.encode(text[:size])
            if prefix.overflowing and last_word(prefix) < last_word(prefix.overflowing[-1]):
                return prefix
            size *= 4
        return self.tokenizer.encode(text)


def last_word(encoding: Encoding) -> int:
    return max((word for word in encoding.word_ids if word is not None), default=-1)


def load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ParameterError(
            f"tokenizer {path.name} not found in the model's version folder; "
            "for the model of this repository, run `python -m models.sentences`"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the library raises nothing more precise)
        raise ParameterError(f"{path.name} is not a valid file of the tokenizers library") from None
