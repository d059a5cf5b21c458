"""Fewer points of a long curve, with every extreme kept.

    x, y of every step -> buckets of equal width -> first, least, greatest and last point of each

The mean of a bucket would hide a spike of a single step; its least and greatest points cannot.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def extremes(x: Floats, y: Floats, buckets: int) -> Indices:
    """Return the indices of the points to draw: the extremes of each bucket, and the ends of the curve.

    Args:
        x: ascending, shape (points,).
        y: shape (points,); NaN and infinities are never chosen.
        buckets: number of intervals that the range of ``x`` is divided into.

    Returns:
        Ascending indices; all finite points, if there are at most two per bucket.
    """
    finite = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    if len(finite) <= 2 * buckets:
        return finite.astype(np.int64)
    places, values = x[finite], y[finite]
    width = (places[-1] - places[0]) or 1.0
    bucket = np.minimum(((places - places[0]) / width * buckets).astype(np.int64), buckets - 1)
    by_value = np.lexsort((values, bucket))
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))  # bucket is ascending, as x is
    stops = np.append(starts[1:], len(bucket)) - 1
    chosen = np.concatenate([by_value[starts], by_value[stops], [0, len(finite) - 1]])
    return np.asarray(finite[np.unique(chosen)], dtype=np.int64)
