"""The sources of digits: handwriting with a fixed split, and the glyphs of fonts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .serving import FloatArray, IntArray

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0
SIDE = 96

UNSEEN_FONTS = (
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmss10", "cmtt10", "cmmi10",
)  # fmt: skip


class Split(NamedTuple):
    """The handwritten digits of scikit-learn, [n, 8, 8] with values 0..16, and their labels."""

    seen: FloatArray
    seen_labels: IntArray
    held_out: FloatArray
    held_out_labels: IntArray


@cache
def handwriting() -> Split:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    # The split precedes the augmentation, so that no version of a held-out digit is trained on.
    digits = load_digits()
    seen, held_out, seen_labels, held_out_labels = train_test_split(
        digits.images.astype(np.float32),
        digits.target.astype(np.int64),
        test_size=HELD_OUT_SHARE,
        random_state=SPLIT_SEED,
        stratify=digits.target,
    )
    return Split(seen, seen_labels, held_out, held_out_labels)


def picture(values: FloatArray) -> Image.Image:
    """Render a handwritten digit of 8 x 8 values, light on black, with a margin."""
    levels = Image.fromarray(np.pad(values * (255 / 16) + 0.5, 1).astype(np.uint8))
    return levels.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def glyph(digit: int, font: Path, ground: int = 0, ink: int = 255, height: int = 64) -> Image.Image:
    """Render a printed digit in the centre of a square; `height` is the font size in pixels."""
    side = height * 3 // 2
    image = Image.new("L", (side, side), ground)
    face = ImageFont.truetype(str(font), height)
    ImageDraw.Draw(image).text((side / 2, side / 2), str(digit), fill=ink, font=face, anchor="mm")
    return image


def font_files(pattern: str) -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(folder.glob(f"{pattern}.ttf"))


def training_fonts() -> list[Path]:
    # The two display faces of DejaVu have no digits.
    return [font for font in font_files("DejaVu*") if not font.stem.endswith("Display")]


def unseen_fonts() -> list[Path]:
    return [font for name in UNSEEN_FONTS for font in font_files(name)]


def turned(image: Image.Image, angle: float) -> Image.Image:
    ground = image.getpixel((0, 0))
    return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=ground)


def printed_digits(font: Path, seed: int, count: int = 50) -> tuple[list[Image.Image], IntArray]:
    """Render digits of one font in several sizes, contrasts and angles; the same number of each."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    pictures = []
    for label in labels:
        dark, light = int(rng.integers(0, 90)), int(rng.integers(165, 256))
        ground, ink = (light, dark) if rng.random() < 0.5 else (dark, light)
        printed = glyph(int(label), font, ground, ink, int(rng.integers(24, 160)))
        pictures.append(turned(printed, rng.uniform(-8, 8)))
    return pictures, labels
