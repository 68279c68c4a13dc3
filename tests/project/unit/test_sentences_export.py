"""The sentence model as built, against what PyTorch answered for the same texts."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.support.servers import ROOT

pytestmark = pytest.mark.long


TOKENIZER_FOLDER = ROOT / "triton_repo" / "text_preprocessing" / "1"

Vectors = NDArray[np.float32]

REFERENCE: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "data" / "sentences_reference.json").read_text(encoding="ascii")
)
EXPECTED: Vectors = np.array([answer["embedding"] for answer in REFERENCE], np.float32)
ROWS: list[list[int]] = [answer["input_ids"] for answer in REFERENCE]


def load_module(path: Path) -> ModuleType:
    """A file of a model's version folder, which no import statement can name."""
    name = f"{path.parents[1].name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


tokens = load_module(TOKENIZER_FOLDER / "tokens.py")
embeddings = load_module(ROOT / "triton_repo" / "text_postprocessing" / "1" / "embeddings.py")


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # several would wait for each other by spinning
    model = ROOT / "triton_repo" / "text_core" / "1" / "model.onnx"
    return onnxruntime.InferenceSession(model, options)


def embed(session: onnxruntime.InferenceSession, rows: list[list[int]], length: int = 0) -> Vectors:
    length = length or max(len(row) for row in rows)
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], np.int64)
    ids = np.zeros_like(mask)
    ids[mask == 1] = np.concatenate(rows)
    feed = {"input_ids": ids, "attention_mask": mask}
    return session.run(["sentence_embedding"], feed)[0]  # type: ignore[no-any-return]


def cosines(one: Vectors, other: Vectors) -> NDArray[np.float64]:
    one, other = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.einsum("ij,ij->i", one, other) / lengths  # type: ignore[no-any-return]


NAMES = [answer["name"] for answer in REFERENCE]
ALL = list(range(len(REFERENCE)))


@pytest.mark.parametrize(
    "batch",
    # The mixed batch is without the longest text, to which all would be padded.
    [*([number] for number in ALL), ALL[:-1]],
    ids=[*NAMES, "mixed batch"],
)
def test_model_embeds_a_batch_as_pytorch_does(
    session: onnxruntime.InferenceSession, batch: list[int]
) -> None:
    found, expected = embed(session, [ROWS[number] for number in batch]), EXPECTED[batch]
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert cosines(found, expected).min() >= 0.999999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        pytest.param(ROWS, 0, id="together"),
        pytest.param(ROWS[::-1], 0, id="backwards"),
        *(pytest.param(ROWS[:1], length, id=f"padded to {length}") for length in (16, 48, 256)),
    ],
)
def test_model_given_neighbours_or_padding_embeds_as_without(
    session: onnxruntime.InferenceSession, rows: list[list[int]], length: int
) -> None:
    alone = np.concatenate([embed(session, [row]) for row in rows])
    np.testing.assert_allclose(embed(session, rows, length), alone, rtol=0, atol=1e-6)


def test_model_given_a_paraphrase_finds_it_closer_than_another_text(
    session: onnxruntime.InferenceSession,
) -> None:
    rows = {answer["name"]: answer["input_ids"] for answer in REFERENCE}
    found = embed(session, [rows["ordinary"], rows["paraphrase"], rows["unrelated"]])
    paraphrase, stranger = cosines(found[[0, 0]], found[1:])
    assert paraphrase > 0.7
    assert stranger < 0.2


def encoder(**settings: Any) -> Any:
    return tokens.TextEncoder(TOKENIZER_FOLDER, tokens.Settings(**settings))


def test_encoder_given_the_reference_texts_makes_their_tokens() -> None:
    texts = [answer["text"].encode() for answer in REFERENCE]
    ids, mask = encoder().rows(texts)
    assert [row[: kept.sum()].tolist() for row, kept in zip(ids, mask, strict=True)] == ROWS


@pytest.mark.parametrize(
    ("text", "length"), [("", 16), ("word " * 13, 16), ("word " * 15, 48), ("word " * 99, 256)]
)
def test_encoder_pads_a_row_to_the_next_of_the_lengths(text: str, length: int) -> None:
    ids, mask = encoder(padded_lengths=(16, 48)).rows([text.encode()])
    assert ids.shape == mask.shape == (1, length)
    assert not ids[mask == 0].any()


@pytest.mark.parametrize(
    "text",
    [
        "word " * 2_000,
        "unbelievably" * 2_000 + " short " * 1_000,
        "중국中国" * 2_000,
        "!?" * 4_000,
        "Zu\u0308rich, cafe\u0301. " * 500,
        " " * 30_000 + "late " * 1_000,
        "x" * 4_095 + " y" + "z" * 200 + " end " * 1_000,
    ],
    ids=["words", "long word", "no spaces", "punctuation", "accents", "late start", "cut word"],
)
def test_encoder_given_a_long_text_makes_the_tokens_of_the_whole(text: str) -> None:
    whole = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    whole.no_padding()
    whole.enable_truncation(256)
    ids, _ = encoder().rows([text.encode()])
    assert ids[0].tolist() == whole.encode(text).ids


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([b"caf\xe9"], "the text is not valid UTF-8 (at byte 3)"),
        ([b"good", b"\xed\xa0\x80"], "text 2 of 2 is not valid UTF-8 (at byte 0)"),
        ([b"123456789"], "the text has 9 bytes; the limit is 8 bytes"),
        ([b"1", b"123456789", b"2"], "text 2 of 3 has 9 bytes; the limit is 8 bytes"),
    ],
)
def test_encoder_given_a_bad_text_says_what_is_wrong(texts: list[bytes], message: str) -> None:
    with pytest.raises(tokens.TextError) as caught:
        encoder(max_text_bytes=8).rows(texts)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_tokens": "many"}, "max_tokens must be a positive integer, not 'many'"),
        ({"max_tokens": "-1"}, "max_tokens must be a positive integer, not '-1'"),
        ({"max_tokens": "2"}, "max_tokens must be at least 3 for this tokenizer"),
        ({"padded_lengths": "32,16"}, "padded_lengths must be strictly increasing"),
        (
            {"padded_lengths": "512"},
            "padded_lengths contains 512, which is greater than max_tokens (256)",
        ),
        ({"tokenizer_file": "../x"}, "tokenizer_file must be a file name without a folder"),
        (
            {"tokenizer_file": "tokens.py"},
            "tokens.py is not a valid file of the tokenizers library",
        ),
    ],
)
def test_encoder_with_a_wrong_parameter_fails_to_load(
    parameters: dict[str, str], message: str
) -> None:
    config = {"parameters": {name: {"string_value": text} for name, text in parameters.items()}}
    with pytest.raises(tokens.ParameterError) as caught:
        tokens.TextEncoder(TOKENIZER_FOLDER, tokens.settings_of(config))
    assert str(caught.value) == message


def test_settings_ignore_parameters_of_the_gateway_and_of_triton() -> None:
    others = {"gateway.content_type.TEXT": "text/plain", "EXECUTION_ENV_PATH": "env"}
    config = {"parameters": {name: {"string_value": text} for name, text in others.items()}}
    assert tokens.settings_of(config) == tokens.Settings()


def test_finish_with_a_size_shortens_an_embedding_and_normalises_it() -> None:
    finish = embeddings.Finish(size=100, normalize=True)
    found = finish(np.concatenate([EXPECTED, np.zeros_like(EXPECTED[:1])]))
    assert found.shape == (len(EXPECTED) + 1, 100)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found[:-1], axis=1), 1, rtol=1e-6)
    assert not found[-1].any()
    np.testing.assert_array_equal(
        embeddings.Finish(size=100, normalize=False)(EXPECTED), EXPECTED[:, :100]
    )
