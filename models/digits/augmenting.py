"""Training samples: augmented images of digits, converted by the serving code."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from .samples import glyph, handwriting, picture, training_fonts
from .serving import FloatArray, IntArray, ink

HANDWRITTEN_COPIES = 36
PRINTED_COPIES = 100


class Source(NamedTuple):
    image: Image.Image
    label: int
    copies: int
    seed: int


def training_set(seed: int) -> tuple[FloatArray, IntArray]:
    """Return tensors [n, 1, 16, 16] and labels."""
    sources = list(_sources(seed))
    with ProcessPoolExecutor() as processes:
        tensors = np.concatenate(list(processes.map(_versions, sources, chunksize=16)))
    labels = np.concatenate([np.full(source.copies, source.label) for source in sources])
    return tensors, labels


def _sources(seed: int) -> Iterator[Source]:
    digits = handwriting()
    for index, (values, label) in enumerate(zip(digits.seen, digits.seen_labels, strict=True)):
        yield Source(picture(values), int(label), HANDWRITTEN_COPIES, seed + index)
    for index, font in enumerate(training_fonts()):
        for digit in range(10):
            printed_seed = seed + 100_000 + 10 * index + digit
            yield Source(glyph(digit, font), digit, PRINTED_COPIES, printed_seed)
        flagged_seed = seed + 200_000 + index
        yield Source(_without_base(glyph(1, font)), 1, PRINTED_COPIES, flagged_seed)


def _without_base(one: Image.Image) -> Image.Image:
    # A handwritten 1 often has a flag but no base, and then resembles a 7.
    box = one.getbbox()
    assert box is not None
    left, top, right, bottom = box
    cut = one.copy()
    cut.paste(0, (left, bottom - (bottom - top) // 6, right, bottom))
    return cut


def _versions(source: Source) -> FloatArray:
    rng = np.random.default_rng(source.seed)
    versions = [ink(source.image)]
    versions += [ink(_version(source.image, rng)) for _ in range(source.copies - 1)]
    return np.stack(versions)


def _version(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    rotated = image.transform(
        image.size, Image.Transform.AFFINE, _affine(image.size[0], rng), Image.Resampling.BICUBIC
    )
    if rng.random() < 0.3:
        rotated = rotated.filter(ImageFilter.MaxFilter(int(rng.choice([3, 5, 7]))))
    blurred = np.asarray(rotated.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2))))
    levels = blurred / blurred.max()  # thin lines must not vanish
    weight = rng.uniform(0.25, 0.6)
    strokes = np.clip((levels - weight + 0.15) / 0.3, 0, 1)
    noisy = 20 + 200 * strokes + rng.normal(0, rng.uniform(0, 12), strokes.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def _affine(side: int, rng: np.random.Generator) -> tuple[float, ...]:
    # The matrix maps a pixel of the result to a pixel of the source, relative to the centre.
    angle = np.radians(rng.uniform(-12, 12))
    shear = rng.uniform(-0.3, 0.3)
    stretch = np.exp(rng.uniform(-0.25, 0.25))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = 1.15 * turn @ np.array([[1, shear], [0, 1]]) @ np.diag([stretch, 1 / stretch])
    offset = side / 2 - matrix @ np.full(2, side / 2)
    return (*matrix[0], offset[0], *matrix[1], offset[1])
