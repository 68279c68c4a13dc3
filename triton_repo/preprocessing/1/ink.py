"""A transform for a single written or printed character on a plain background."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from .parameters import require
from .picture import Draft, FloatArray, PictureError

BLANK = "no ink found: the picture is blank"
LARGEST_SIDE = 256
SMALLEST_SMOOTHED_SIDE = 100
LEAST_CONTRAST = 20.0
LEAST_INK_PIXELS = 3
OUTLIERS = 0.004
MARGIN = 0.08
CANVAS = 64
LEAST_STROKE = 0.11


@dataclass(frozen=True)
class Ink:
    """Detect dark or light ink, centre it and normalise the stroke width.

    The result is [1, size, size], from `low` (no ink) to `high` (the most ink).
    """

    size: int = 16
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        require(4 <= self.size <= CANVAS, f"size must be between 4 and {CANVAS}, not {self.size}")
        require(self.low < self.high, f"low ({self.low}) must be less than high ({self.high})")

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.size, self.size)

    @property
    def draft(self) -> Draft:
        return Draft("L", 2 * LARGEST_SIDE)

    def __call__(self, picture: Image.Image) -> FloatArray:
        square = _thickened(_square(_ink(_grey(picture))))
        small = np.asarray(square.resize((self.size, self.size), Image.Resampling.BOX), np.float32)
        if not small.any():
            raise PictureError(BLANK)
        values = small / small.max()
        tensor: FloatArray = self.low + (self.high - self.low) * values[np.newaxis]
        return tensor


def _grey(picture: Image.Image) -> Image.Image:
    grey = picture.convert("L")
    scale = LARGEST_SIDE / max(grey.size)
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in grey.size)
        grey = grey.resize((width, height), Image.Resampling.BILINEAR)
    if min(grey.size) >= SMALLEST_SMOOTHED_SIDE:
        grey = grey.filter(ImageFilter.MedianFilter(3))
    return grey


def _ink(grey: Image.Image) -> FloatArray:
    """Return each pixel's difference from the background, 0 to 1; raise PictureError if it is blank.

    The outermost pixels define the background, so dark on light and light on dark are equal.
    """
    values = np.asarray(grey).astype(np.float32)
    edge = np.concatenate([values[0], values[-1], values[1:-1, 0], values[1:-1, -1]])
    difference = np.abs(values - np.median(edge))
    threshold = _otsu(difference)
    is_ink = difference > threshold
    if is_ink.sum() < LEAST_INK_PIXELS or is_ink.all():
        raise PictureError(BLANK)
    ink, ground = difference[is_ink].mean(), difference[~is_ink].mean()
    if ink - ground < LEAST_CONTRAST:
        raise PictureError(BLANK)
    # A ramp around the threshold removes shades of the background and keeps edges smooth.
    levels: FloatArray = np.clip((difference - 0.6 * threshold) / (0.8 * threshold + 1), 0, 1)
    return levels


def _otsu(values: FloatArray) -> float:
    """Return the threshold that best separates two classes of values 0..255 (Otsu 1979)."""
    counts = np.bincount(values.astype(np.uint8).ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(counts)
    above = counts.sum() - below
    sums = np.cumsum(counts * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = sums / below - (sums[-1] - sums) / above
        spread = np.nan_to_num(below * above * distance**2, nan=0.0, posinf=0.0)
    # If no value lies between the classes, a range of thresholds is optimal, and its middle is used.
    return float(np.flatnonzero(spread >= spread.max() * (1 - 1e-9)).mean()) + 0.5


def _square(ink: FloatArray) -> Image.Image:
    left, right = _extent(ink.sum(axis=0))
    top, bottom = _extent(ink.sum(axis=1))
    half = max(right - left, bottom - top) * (0.5 + MARGIN)
    x, y = (left + right) / 2, (top + bottom) / 2
    padding = int(np.ceil(half)) + 1
    levels = Image.fromarray((np.pad(ink, padding) * 255 + 0.5).astype(np.uint8))
    box = (x - half + padding, y - half + padding, x + half + padding, y + half + padding)
    return levels.resize((CANVAS, CANVAS), Image.Resampling.BILINEAR, box=box)


def _extent(profile: npt.NDArray[np.float32]) -> tuple[int, int]:
    # A few stray pixels at either end do not count as ink.
    share = np.cumsum(profile, dtype=np.float64) / profile.sum(dtype=np.float64)
    first = int(np.searchsorted(share, OUTLIERS, side="right"))
    last = int(np.searchsorted(share, 1 - OUTLIERS, side="left"))
    return first, min(last, len(profile) - 1) + 1


def _thickened(square: Image.Image) -> Image.Image:
    # A thin stroke would vanish in the small square.
    missing = LEAST_STROKE * CANVAS - _stroke_width(square)
    radius = round(missing / 2)
    return square.filter(ImageFilter.MaxFilter(2 * radius + 1)) if radius > 0 else square


def _stroke_width(square: Image.Image) -> float:
    # The width is twice the area divided by the outline, which is the area that erosion removes.
    area = np.asarray(square, dtype=np.float64).sum()
    eroded = np.asarray(square.filter(ImageFilter.MinFilter(3)), dtype=np.float64).sum()
    return float(2 * area / max(area - eroded, 1.0))
