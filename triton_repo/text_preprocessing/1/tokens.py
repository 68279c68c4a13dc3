"""Texts to token ids: what is asked of each text, and how long a row of ids becomes."""

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

# Characters of a long text that are looked at first: room for 256 tokens of most languages.
FIRST_LOOK = 4096


class ParameterError(ValueError):
    """A parameter makes no sense; the text is one sentence for whoever loads the model."""


class TextError(ValueError):
    """A text can't be taken; the text is one sentence for the caller."""


@dataclass(frozen=True)
class Settings:
    """What config.pbtxt may set, by these names.

    Rows of ids are as long as the longest text of their request needs, rounded up to one of
    `padded_lengths`; `max_tokens` counts as the last of them, and longer texts are cut there.
    """

    tokenizer_file: str = "tokenizer.json"
    max_tokens: int = 256
    padded_lengths: tuple[int, ...] = ()
    max_text_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if Path(self.tokenizer_file).name != self.tokenizer_file:
            raise ParameterError("tokenizer_file must be a file name without a folder")
        if sorted(set(self.padded_lengths)) != list(self.padded_lengths):
            raise ParameterError("padded_lengths must increase from each number to the next")
        if self.padded_lengths and self.padded_lengths[-1] > self.max_tokens:
            raise ParameterError(
                f"padded_lengths has {self.padded_lengths[-1]}, "
                f"which is above max_tokens ({self.max_tokens})"
            )


def settings_of(model_config: Mapping[str, Any]) -> Settings:
    """From the config's `parameters`; others have a dot (the gateway's) or capitals (Triton's)."""
    given = {
        name: parameter["string_value"]
        for name, parameter in model_config.get("parameters", {}).items()
        if "." not in name and not name.isupper()
    }
    for name in given:
        if name not in READERS:
            raise ParameterError(f"the parameter {name} is unknown; known are {', '.join(READERS)}")
    return Settings(**{name: READERS[name](name, text) for name, text in given.items()})


def whole_number(name: str, text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and int(text) > 0):
        raise ParameterError(f"{name} must be a whole number above zero, not {text!r}")
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
        least = self.tokenizer.num_special_tokens_to_add(False) + 1
        if settings.max_tokens < least:
            raise ParameterError(f"max_tokens must be at least {least} for this tokenizer")
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(settings.max_tokens)

    def rows(self, texts: Sequence[bytes]) -> tuple[Rows, Rows]:
        """`input_ids` and `attention_mask`, each [texts, length]; a TextError says which text."""
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
        most = self.settings.max_text_bytes
        if len(text) > most:
            raise TextError(f"{which} has {len(text)} bytes, and at most {most} are allowed")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise TextError(f"{which} is not valid UTF-8 (at byte {error.start})") from None

    def _encode(self, text: str) -> Encoding:
        """As the tokenizer would, without making it read a megabyte for 256 tokens.

        What it makes of the head of a text is what it makes of the whole, save for the last word,
        which the cut may have split: a head that fills the row with words before that is enough.
        """
        size = FIRST_LOOK
        while size < len(text):
            head = self.tokenizer.encode(text[:size])
            if head.overflowing and last_word(head) < last_word(head.overflowing[-1]):
                return head
            size *= 4
        return self.tokenizer.encode(text)


def last_word(encoding: Encoding) -> int:
    return max((word for word in encoding.word_ids if word is not None), default=-1)


def load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ParameterError(
            f"the tokenizer {path.name} is not in the model's version folder; "
            "for the model of this repository, `python -m models.sentences` puts it there"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the library raises nothing more precise)
        raise ParameterError(f"{path.name} is not a file of the tokenizers library") from None
