"""The one way to write a share, for pages, commands and messages alike: 98.4%, 99.97%, 100.0%.

Never rounds a part up to the whole, nor something down to nothing.
"""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """One digit after the point; two where one could not tell a part from all or from nothing. Raises ValueError on no number."""
    if not math.isfinite(share):
        raise ValueError(f"{share} is no share")
    size = round(abs(share) * 100, 9)
    sign = "−" if share < 0 and size else ""
    if size in (0.0, 100.0):
        return f"{sign}{size:.1f}%"
    if size < 0.01:
        return f"{sign}<0.01%"
    if size < 1 or 99 <= size < 100:
        return f"{sign}{min(size, 99.99):.2f}%"
    return f"{sign}{size:.1f}%"
