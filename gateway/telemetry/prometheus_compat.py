"""Access to private attributes of prometheus_client."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram


def add_observations(histogram: Histogram, bucket_counts: Sequence[int], total: float) -> None:
    """Add many observations at once: their number in each bucket, and their sum."""
    for bucket, count in zip(histogram._buckets, bucket_counts, strict=True):
        bucket.inc(count)
    histogram._sum.inc(total)
