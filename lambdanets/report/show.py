"""Formats numbers, durations and names for people."""

from typing import Any


def percent(share: float | None, digits: int = 2) -> str:
    """Return "97.02%", or "-" for None and nan."""
    return "-" if share is None or share != share else f"{100 * share:.{digits}f}%"


def probability(value: float) -> str:
    """Return a probability in percent, never rounded to 0% or 100%."""
    if value < 0.001:
        return "<0.1%"
    return ">99.9%" if value > 0.999 else f"{100 * value:.1f}%"


def count(value: float | None) -> str:
    """Return "2,345" or "1.23 M"."""
    if value is None:
        return "-"
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def shortened(name: str, most: int) -> str:
    """Return a name of at most `most` characters. The middle is cut out: long names often differ at the end."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return name[: most - 1 - end] + "…" + name[len(name) - end :]


def some(number: int, one: str, more: str) -> str:
    """Return a number with its noun: "1 image", "2,000 images"."""
    return f"{number:,} {one if number == 1 else more}"


def duration(seconds: float) -> str:
    """Return "5 s", "1 min 5 s" or "2 h 1 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def rounded(seconds: float) -> str:
    """Return an estimated duration, rounded to seconds, tens of seconds or minutes."""
    unit = 1 if seconds < 60 else 10 if seconds < 600 else 60
    return duration(unit * round(seconds / unit)).removesuffix(" 0 s")


def rate(value: float | None) -> str:
    """Return a number with three significant digits, from 100 on without decimals."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def flattened(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return (name, value) of nested settings, with dotted names as in the options of `lambdanets train`."""
    if isinstance(data, dict) and data:
        return [pair for key, value in data.items() for pair in flattened(value, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, "" if data is None else str(data))]
