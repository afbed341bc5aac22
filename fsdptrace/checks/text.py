"""How numbers and names are put in a message."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(number: int) -> str:
    """Bytes for a reader: exact below 10 KiB, three figures above."""
    if number < 10 * 1024:
        return f"{number:,} B"
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{number:,} B"


def count(number: int, noun: str) -> str:
    """``3 units``, ``1 unit``, ``2 processes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def pattern(fqn: str) -> str:
    """The name with numbers as stars: ``layers.*.moe.experts`` stands for all layers."""
    return re.sub(r"(?<![^.#])\d+(?![^.#])", "*", fqn)
