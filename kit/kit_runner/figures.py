"""How far an array is from another: what a kit measures on a device, and what the gates of a build judge."""

from __future__ import annotations

from typing import Any

import numpy as np


def psnr(value: Any, expected: Any) -> float:
    """Return the peak signal-to-noise ratio in dB; the peak is the largest expected magnitude. NaN stays NaN."""
    a, b = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    noise = float(np.mean((a - b) ** 2))
    return float(20 * np.log10(max(np.abs(b).max(), 1e-30)) - 10 * np.log10(max(noise, 1e-30)))


def relative_error(value: Any, expected: Any) -> float:
    """Return the largest |value - expected| / |expected| of any row, in the Euclidean norm. NaN stays NaN."""
    a, b = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    norm = np.linalg.norm(b, axis=-1)
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.maximum(norm, 1e-30)))
