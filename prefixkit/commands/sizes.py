"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Bytes from ``"2GiB"``, ``"512 MiB"``, ``"1.5GB"`` or ``"1048576"``.

    Raises:
        ValueError: Not a number with one of these units, or less than a byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = 0 if found is None else int(Fraction(found[1]) * _UNITS.get(found[2].upper(), 0))
    if size < 1:
        raise ValueError(f'a size must look like "2GiB", "512MiB" or "1.5GB", got "{text}"')
    return size
