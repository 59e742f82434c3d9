"""Numbers as people read them."""

from typing import Any


def percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None or share != share else f"{100 * share:.{digits}f}%"


def probability(value: float) -> str:
    """In percent, never rounded to certainty."""
    if value < 0.001:
        return "<0.1%"
    return ">99.9%" if value > 0.999 else f"{100 * value:.1f}%"


def count(value: float | None) -> str:
    """2,345 or 1.23 M."""
    if value is None:
        return "-"
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def shortened(name: str, most: int) -> str:
    """Without its middle where it is too long: long names often differ at their end."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return name[: most - 1 - end] + "…" + name[len(name) - end :]


def some(number: int, one: str, more: str) -> str:
    """The number with its word."""
    return f"{number:,} {one if number == 1 else more}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def rounded(seconds: float) -> str:
    """A duration that is estimated: no more digits than it deserves."""
    unit = 1 if seconds < 60 else 10 if seconds < 600 else 60
    return duration(unit * round(seconds / unit)).removesuffix(" 0 s")


def rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def flattened(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Settings with dotted names, as `lambdanets train` takes them."""
    if isinstance(data, dict) and data:
        return [pair for key, value in data.items() for pair in flattened(value, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, "" if data is None else str(data))]
