"""Sizes and durations as people read them."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB")


def size(count: float) -> str:
    """Return bytes as a person reads them, in powers of 1000."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a duration as a person says it: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def about(seconds: float) -> str:
    """Return a duration that is only estimated: under 10 s, about 40 s, about 3 min, about 2 h 10 min."""
    if seconds < 10:
        return "under 10 s"
    if seconds < 55:
        return f"about {round(seconds, -1):.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(round(minutes, -1), 60)
    return f"about {minutes} min" if minutes < 60 else f"about {hours} h{f' {rest} min' * bool(rest)}"


def clock(seconds: float) -> str:
    """Return the time since a beginning: 3:20, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:>2}:{rest:02}"
