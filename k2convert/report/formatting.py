"""Numbers as text, the same in the page, the Markdown and the checks."""

import math
import re


def decibels(value: float | None) -> str:
    """Return "22.62 dB", or a word for an infinite ratio; None is what JSON documents have for one."""
    if value is None:
        return "not finite"
    if math.isfinite(value):
        return f"{value:.2f} dB"
    return "exact" if value > 0 else "broken"


def percent(part: int, whole: int) -> str:
    """Return a share; "0 %" and "100 %" only if the share is exactly that, "" if there is no whole."""
    if not whole:
        return ""
    share = 100 * part / whole
    if part > 0 and share < 0.001:
        return "< 0.001 %"
    if part < whole and share > 99.999:
        return "> 99.999 %"
    digits = 1 if 1 <= share <= 99 else 3
    return f"{share:.{digits}f} %" if 0 < part < whole else f"{share:.0f} %"


def power_of_two(exponent: int) -> str:
    """Return "8" or "2⁻⁶"."""
    if 0 <= exponent <= 9:
        return f"{2**exponent}"
    return f"2{_raised(str(exponent))}"


def _raised(exponent: str) -> str:
    return "".join("⁻" if c == "-" else "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] for c in exponent)


def with_exponents(text: str) -> str:
    """Return a text of the terminal with "2⁻⁶" for each "2^-6"."""
    return re.sub(r"\b2\^(-?[0-9]+)", lambda found: f"2{_raised(found[1])}", text)


def counted(count: int, noun: str) -> str:
    """Return "1 window" or "2,000 windows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_count(value: float, _position: object = None) -> str:
    """Return "1.5 M", for the axis of a chart."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:g}"
