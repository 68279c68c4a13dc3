"""A renderer of synthetic handwritten digits for tests; they are never used for training.

    python -m models.digits.drawing

writes the sample images of docs/images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

Floats = npt.NDArray[np.float64]
Outline = list[tuple[str, list[tuple[float, float]]]]

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
OVERSAMPLING = 3

LINE, CURVE = "line", "curve"

# The common shapes of each digit as strokes in the unit square, with y downwards.
SHAPES: dict[int, list[Outline]] = {
    0: [
        [(CURVE, [(0.55, 0), (0.15, 0.15), (0, 0.5), (0.15, 0.87), (0.5, 1), (0.85, 0.85),
                  (1, 0.5), (0.86, 0.14), (0.5, 0)])],
        [(CURVE, [(0.65, 0.02), (0.2, 0.1), (0.02, 0.55), (0.25, 0.95), (0.6, 0.98), (0.95, 0.7),
                  (0.95, 0.3), (0.6, 0.01), (0.45, 0.04)])],
    ],
    1: [
        [(LINE, [(0.5, 0), (0.5, 1)])],
        [(LINE, [(0.15, 0.25), (0.55, 0), (0.55, 1)])],
        [(LINE, [(0.2, 0.22), (0.52, 0), (0.52, 1)]), (LINE, [(0.2, 1), (0.85, 1)])],
    ],
    2: [
        [(CURVE, [(0.06, 0.25), (0.2, 0.06), (0.5, 0), (0.84, 0.1), (0.9, 0.32), (0.66, 0.62),
                  (0.34, 0.84), (0.06, 1)]), (LINE, [(0.06, 1), (0.98, 0.99)])],
        [(CURVE, [(0.08, 0.2), (0.45, 0), (0.88, 0.18), (0.8, 0.48), (0.4, 0.85), (0.12, 0.97),
                  (0.1, 0.85), (0.3, 0.84), (0.6, 0.97), (1, 0.95)])],
    ],
    3: [
        [(CURVE, [(0.08, 0.12), (0.45, 0), (0.84, 0.12), (0.82, 0.36), (0.4, 0.47)]),
         (CURVE, [(0.4, 0.47), (0.86, 0.58), (0.94, 0.8), (0.55, 1), (0.05, 0.9)])],
        [(LINE, [(0.1, 0.02), (0.88, 0), (0.45, 0.4)]),
         (CURVE, [(0.45, 0.4), (0.85, 0.52), (0.92, 0.78), (0.55, 1), (0.06, 0.92)])],
    ],
    4: [
        [(LINE, [(0.68, 0), (0.03, 0.68), (1, 0.68)]), (LINE, [(0.68, 0), (0.68, 1)])],
        [(LINE, [(0.3, 0), (0.06, 0.6), (0.98, 0.58)]), (LINE, [(0.72, 0.28), (0.68, 1)])],
        [(LINE, [(0.12, 0.02), (0.1, 0.55), (0.9, 0.55)]), (LINE, [(0.86, 0), (0.84, 1)])],
    ],
    5: [
        [(LINE, [(0.9, 0), (0.2, 0.01), (0.14, 0.45)]),
         (CURVE, [(0.14, 0.45), (0.5, 0.36), (0.88, 0.5), (0.9, 0.8), (0.5, 1), (0.05, 0.9)])],
        [(CURVE, [(0.2, 0.03), (0.13, 0.42), (0.55, 0.4), (0.9, 0.6), (0.8, 0.9), (0.4, 1),
                  (0.05, 0.92)]), (LINE, [(0.2, 0.03), (0.92, 0)])],
    ],
    6: [
        [(CURVE, [(0.75, 0), (0.36, 0.24), (0.08, 0.62), (0.2, 0.93), (0.55, 1), (0.9, 0.82),
                  (0.78, 0.56), (0.42, 0.52), (0.12, 0.7)])],
        [(CURVE, [(0.5, 0), (0.15, 0.4), (0.06, 0.78), (0.4, 1), (0.85, 0.9), (0.85, 0.62),
                  (0.5, 0.54), (0.1, 0.72)])],
    ],
    7: [
        [(LINE, [(0.03, 0.01), (0.96, 0), (0.38, 1)])],
        [(LINE, [(0.03, 0.01), (0.96, 0), (0.4, 1)]), (LINE, [(0.25, 0.5), (0.9, 0.48)])],
        [(LINE, [(0.04, 0.14), (0.06, 0.01), (0.92, 0)]),
         (CURVE, [(0.92, 0), (0.6, 0.4), (0.48, 0.7), (0.45, 1)])],
    ],
    8: [
        [(CURVE, [(0.82, 0.12), (0.5, 0), (0.14, 0.14), (0.2, 0.36), (0.55, 0.49), (0.9, 0.66),
                  (0.88, 0.9), (0.5, 1), (0.1, 0.88), (0.12, 0.66), (0.5, 0.48), (0.82, 0.32),
                  (0.8, 0.1)])],
        [(CURVE, [(0.5, 0), (0.12, 0.1), (0.12, 0.36), (0.5, 0.46), (0.88, 0.34), (0.86, 0.1),
                  (0.5, 0)]),
         (CURVE, [(0.5, 0.46), (0.04, 0.6), (0.06, 0.9), (0.5, 1), (0.94, 0.9), (0.95, 0.6),
                  (0.5, 0.46)])],
    ],
    9: [
        [(CURVE, [(0.88, 0.2), (0.55, 0), (0.15, 0.1), (0.12, 0.4), (0.5, 0.52), (0.86, 0.3),
                  (0.88, 0.16)]), (LINE, [(0.88, 0.2), (0.8, 1)])],
        [(CURVE, [(0.86, 0.14), (0.45, 0), (0.08, 0.22), (0.3, 0.5), (0.7, 0.46), (0.9, 0.16),
                  (0.9, 0.5), (0.75, 0.88), (0.4, 1), (0.12, 0.92)])],
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Pen:
    """The style of the strokes. Lengths are relative to the digit's height; angles are in degrees."""

    width: float = 0.09
    shake: float = 0.0
    slope: float = 0.0
    slant: float = 0.0
    aspect: float = 0.65


@dataclass(frozen=True)
class Paper:
    """The background: size in pixels, grey levels 0..255, and the position of the digit."""

    size: tuple[int, int] = (200, 260)
    centre: tuple[float, float] = (0.5, 0.5)
    height: float = 0.6
    ground: int = 240
    ink: int = 30
    shading: float = 0.0
    noise: float = 0.0
    blur: float = 0.0


def drawn(digit: int, pen: Pen, paper: Paper, rng: np.random.Generator) -> Image.Image:
    shapes = SHAPES[digit]
    shape = shapes[rng.integers(len(shapes))]
    stencil = _stencil(
        [_placed(_path(*stroke, pen, rng), pen, paper) for stroke in shape], pen, paper
    )
    level = np.asarray(stencil, dtype=np.float64) / 255
    values = _ground(paper) * (1 - level) + paper.ink * level
    values += rng.normal(0, paper.noise, values.shape) if paper.noise else 0
    return Image.fromarray(np.clip(values + 0.5, 0, 255).astype(np.uint8))


def drawn_at_random(digit: int, rng: np.random.Generator) -> Image.Image:
    pen = Pen(
        width=rng.uniform(0.035, 0.15),
        shake=rng.uniform(0.0, 0.03),
        slope=rng.uniform(-10, 10),
        slant=rng.uniform(-0.12, 0.3),
        aspect=rng.uniform(0.45, 0.85),
    )
    ground, ink = _contrasting(rng)
    size = (int(rng.integers(64, 420)), int(rng.integers(64, 420)))
    height = rng.uniform(0.4, 0.8) * min(1.0, size[0] / size[1])
    paper = Paper(
        size=size,
        centre=(rng.uniform(0.42, 0.58), 0.5 + (0.5 - height * 0.6) * rng.uniform(-0.8, 0.8)),
        height=height,
        ground=ground,
        ink=ink,
        shading=rng.uniform(0, 20),
        noise=rng.uniform(0, 10),
        blur=rng.uniform(0, 1.2) * min(size) / 200,
    )
    return drawn(digit, pen, paper, rng)


def drawn_digits(count: int, seed: int) -> tuple[list[Image.Image], npt.NDArray[np.int64]]:
    """Return images and labels, with the same number of each digit."""
    labels = np.arange(count) % 10
    pictures = [
        drawn_at_random(int(label), np.random.default_rng((seed, index)))
        for index, label in enumerate(labels)
    ]
    return pictures, labels


def _contrasting(rng: np.random.Generator) -> tuple[int, int]:
    # Either the ground or the ink is the darker one.
    dark, light = int(rng.integers(0, 90)), int(rng.integers(165, 256))
    return (light, dark) if rng.random() < 0.6 else (dark, light)


def _path(
    kind: str, corners: list[tuple[float, float]], pen: Pen, rng: np.random.Generator
) -> Floats:
    points = np.array(corners) + rng.normal(0, pen.shake, (len(corners), 2))
    return _smooth(points) if kind == CURVE else _straight(points)


def _straight(points: Floats, steps: int = 24) -> Floats:
    along = np.linspace(0, len(points) - 1, steps * (len(points) - 1) + 1)
    knots = np.arange(len(points))
    return np.stack([np.interp(along, knots, points[:, axis]) for axis in (0, 1)], axis=1)


def _smooth(points: Floats, steps: int = 12) -> Floats:
    # This is a Catmull-Rom spline.
    padded = np.concatenate([points[:1], points, points[-1:]])
    t = np.linspace(0, 1, steps, endpoint=False)[:, np.newaxis]
    pieces = []
    for a, b, c, d in zip(padded, padded[1:], padded[2:], padded[3:], strict=False):
        linear, square, cube = c - a, 2 * a - 5 * b + 4 * c - d, 3 * (b - c) + d - a
        pieces.append(0.5 * (2 * b + linear * t + square * t**2 + cube * t**3))
    return np.concatenate([*pieces, points[-1:]])


def _placed(path: Floats, pen: Pen, paper: Paper) -> Floats:
    centred = (path - 0.5) * (pen.aspect, 1.0)
    centred[:, 0] -= pen.slant * centred[:, 1]
    angle = np.radians(pen.slope)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    scale = paper.height * paper.size[1]
    where = np.array(paper.centre) * paper.size
    placed: Floats = ((centred @ turn) * scale + where) * OVERSAMPLING
    return placed


def _stencil(paths: list[Floats], pen: Pen, paper: Paper) -> Image.Image:
    width, height = paper.size
    large = Image.new("L", (width * OVERSAMPLING, height * OVERSAMPLING))
    draw = ImageDraw.Draw(large)
    radius = max(pen.width * paper.height * height, 1.2) * OVERSAMPLING / 2
    for path in paths:
        draw.line([tuple(point) for point in path], fill=255, width=round(2 * radius))
        for x, y in path:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    stencil = large.resize(paper.size, Image.Resampling.BOX)
    return stencil.filter(ImageFilter.GaussianBlur(paper.blur)) if paper.blur else stencil


def _ground(paper: Paper) -> Floats:
    width, height = paper.size
    down, across = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    ground: Floats = paper.ground - paper.shading * (down + across) / 2
    return ground


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(12)
    pen = Pen(width=0.08, shake=0.012, slope=3, slant=0.1)
    on_paper = Paper(size=(200, 260), centre=(0.6, 0.42), height=0.5, ground=247, ink=38)
    drawn(7, pen, on_paper, rng).save(IMAGES / "seven.png", optimize=True)
    on_board = Paper(
        size=(260, 220), centre=(0.4, 0.55), height=0.62, ground=44, ink=228, noise=2.0, blur=0.6
    )
    drawn(3, pen, on_board, rng).save(IMAGES / "three.jpg", quality=80)


if __name__ == "__main__":
    main()
