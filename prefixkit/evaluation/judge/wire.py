"""Python values as bytes, for messages between the judge and the programs in its sandboxes.

A reader makes values of the types below and no others, runs none of the sender's code, and is bounded: in depth, in
the number of values, and by the length of the message.  This file also runs inside the sandbox, so it imports little.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

DEPTH = 200  # levels of nested containers
VALUES = 1_000_000  # values in one message
ITEMS = 10_000  # items of an iterator

_LENGTH = struct.Struct(">I")
_DOUBLE = struct.Struct("<d")
_VIEWS = {b"K": type({}.keys()), b"V": type({}.values()), b"M": type({}.items())}
_VIEW_TAGS = {kind: tag for tag, kind in _VIEWS.items()}
_SEQUENCES = ((list, b"l"), (tuple, b"t"), (set, b"S"), (frozenset, b"Z"))


class WireError(ValueError):
    """A message is malformed, or exceeds a bound."""


class Opaque:
    """A value that stays in the process that made it; here it equals nothing, not even itself.

    Attributes:
        handle: The number by which the other side finds the value.
        type: The name of the value's type there.
    """

    __hash__ = object.__hash__

    def __init__(self, handle: int, type_name: str) -> None:
        self.handle, self.type = handle, type_name

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self.type}>"


class Unhashed:
    """A set or a dict as it was sent, without its hash table, which a sender could make slow to build.

    Attributes:
        kind: ``set``, ``frozenset`` or ``dict``.
        items: Elements, or pairs of key and value; there may be duplicates.
    """

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class Writer:
    """Writes one message.

    Args:
        keep: Gives a number for a value of another type, by which the other side may refer to it.
    """

    def __init__(self, keep: Callable[[Any], int] | None = None) -> None:
        self._keep = keep
        self._parts: list[bytes] = []
        self._left = VALUES

    def bytes_of(self, value: Any) -> bytes:
        """The message.

        Raises:
            WireError: there are too many values, or they are nested too deeply, as a list within itself.
        """
        self._write(value, 0)
        return b"".join(self._parts)

    def _write(self, value: Any, depth: int) -> None:
        self._left -= 1
        if depth > DEPTH or self._left < 0:
            raise WireError(f"more than {DEPTH} levels or {VALUES} values")
        kind = type(value)
        if value is None or kind is bool:
            self._parts.append(b"N" if value is None else b"T" if value else b"F")
        elif kind is int:
            size = value.bit_length() // 8 + 1
            self._sized(b"i", value.to_bytes(size, "little", signed=True))
        elif kind is float:
            self._parts.append(b"d" + _DOUBLE.pack(value))
        elif kind is str:
            self._sized(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is list or kind is tuple:
            self._sequence(b"l" if kind is list else b"t", value, depth)
        else:
            self._write_other(value, kind, depth)

    def _write_other(self, value: Any, kind: type, depth: int) -> None:
        if kind is complex:
            self._parts.append(b"c" + _DOUBLE.pack(value.real) + _DOUBLE.pack(value.imag))
        elif issubclass(kind, Opaque):
            self._sized(b"h", value.handle.to_bytes(8, "little"))
        elif kind is range:
            self._sequence(b"r", (value.start, value.stop, value.step), depth)
        elif kind in _VIEW_TAGS:
            self._sequence(_VIEW_TAGS[kind], list(value), depth)
        elif issubclass(kind, dict):
            self._count(b"m", dict.__len__(value))
            for key, item in dict.items(value):
                self._write(key, depth + 1)
                self._write(item, depth + 1)
        elif bases := [entry for entry in _SEQUENCES if issubclass(kind, entry[0])]:
            base, tag = bases[0]
            self._sequence(tag, list(base.__iter__(value)), depth)
        elif issubclass(kind, bytes):
            self._sized(b"b", bytes.__getitem__(value, slice(None)))
        elif issubclass(kind, bytearray):
            self._sized(b"a", bytes(bytearray.__getitem__(value, slice(None))))
        elif issubclass(kind, str):
            self._write(str.__str__(value), depth)
        elif issubclass(kind, int):
            self._write(int.__int__(value), depth)
        elif issubclass(kind, float):
            self._write(float.__float__(value), depth)
        elif "__next__" in dir(kind):
            items = list(islice(value, ITEMS + 1))
            self._sequence(b"j" if len(items) <= ITEMS else b"J", items[:ITEMS], depth)
        else:
            handle = self._keep(value) if self._keep else 0
            self._sized(b"o", handle.to_bytes(8, "little") + str(kind.__name__)[:80].encode("utf-8", "replace"))

    def _sequence(self, tag: bytes, values: Iterable[Any], depth: int) -> None:
        values = tuple(values)
        if packed := _packed(tag, values):
            self._left -= len(values)
            self._parts.append(packed)
            return
        self._count(tag, len(values))
        for item in values:
            self._write(item, depth + 1)

    def _count(self, tag: bytes, count: int) -> None:
        self._parts.append(tag + _LENGTH.pack(count))

    def _sized(self, tag: bytes, content: bytes) -> None:
        self._parts.append(tag + _LENGTH.pack(len(content)) + content)


def _packed(tag: bytes, values: tuple[Any, ...]) -> bytes:
    """A long list or tuple of floats, or of 64-bit ints, as one array; b"" for all others."""
    kinds = set(map(type, values)) if len(values) > 8 and tag in (b"l", b"t") else set()
    code = "q" if kinds == {int} else "d" if kinds == {float} else ""
    if code:
        with suppress(struct.error):
            content = struct.pack(f"<{len(values)}{code}", *values)
            return b"P" + tag + code.encode() + _LENGTH.pack(len(values)) + content
    return b""


class Reader:
    """Reads one message.

    Args:
        content: The message.
        hashed: Whether to make sets and dicts; if not, they are read as :class:`Unhashed`.
        find: Gives the value for a handle, if this side keeps values.
        opaque: The class of values that stay on the other side.
    """

    def __init__(
        self,
        content: bytes,
        hashed: bool = True,
        find: Callable[[int], Any] | None = None,
        opaque: type[Opaque] = Opaque,
    ) -> None:
        self._content, self._at, self._left = content, 0, VALUES
        self._hashed, self._find, self._opaque = hashed, find, opaque

    def value(self) -> Any:
        """The value.

        Raises:
            WireError: the message is malformed, or exceeds a bound.
        """
        try:
            found = self._read(0)
        except WireError:
            raise
        except (struct.error, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"malformed message: {type(error).__name__}") from None
        if self._at != len(self._content):
            raise WireError("malformed message: something follows it")
        return found

    def _read(self, depth: int) -> Any:
        self._left -= 1
        if depth > DEPTH or self._left < 0:
            raise WireError(f"more than {DEPTH} levels or {VALUES} values")
        tag = self._take(1)
        if tag in b"NTF":
            return None if tag == b"N" else tag == b"T"
        if tag == b"i":
            return int.from_bytes(self._sized(), "little", signed=True)
        if tag == b"d":
            return _DOUBLE.unpack(self._take(8))[0]
        if tag == b"s":
            return self._sized().decode("utf-8", "surrogatepass")
        if tag in b"lt":
            found = [self._read(depth + 1) for _ in range(self._length())]
            return found if tag == b"l" else tuple(found)
        if tag == b"P":
            return self._unpacked()
        return self._read_other(tag, depth)

    def _read_other(self, tag: bytes, depth: int) -> Any:
        if tag == b"c":
            return complex(*struct.unpack("<2d", self._take(16)))
        if tag == b"b":
            return self._sized()
        if tag == b"a":
            return bytearray(self._sized())
        if tag == b"h":
            if self._find is None:
                raise WireError("malformed message: it refers to a value, and none is kept here")
            return self._find(int.from_bytes(self._sized(), "little"))
        if tag == b"o":
            content = self._sized()
            return self._opaque(int.from_bytes(content[:8], "little"), content[8:].decode("utf-8"))
        if tag == b"m":
            pairs = [(self._read(depth + 1), self._read(depth + 1)) for _ in range(self._length())]
            return dict(pairs) if self._hashed else Unhashed(dict, pairs)
        items = [self._read(depth + 1) for _ in range(self._length())]
        if tag in b"SZ":
            kind = set if tag == b"S" else frozenset
            return kind(items) if self._hashed else Unhashed(kind, items)
        return self._iterable(tag, items)

    def _iterable(self, tag: bytes, items: list[Any]) -> Any:
        if tag == b"j":
            return iter(items)
        if tag == b"J":
            return _cut(items)
        if tag == b"r":
            if len(items) != 3 or 0 in items[2:] or any(type(item) is not int for item in items):
                raise WireError("malformed message: no such range")
            return range(*items)
        if tag not in _VIEWS:
            raise WireError("malformed message: no such tag")
        if not self._hashed:
            return iter(items)
        if tag == b"K":
            return dict.fromkeys(items).keys()
        return dict(enumerate(items)).values() if tag == b"V" else dict(items).items()

    def _unpacked(self) -> Any:
        tag, code = self._take(1), self._take(1)
        count = self._length()
        if code not in b"qd" or tag not in b"lt":
            raise WireError("malformed message: no such array")
        self._left -= count
        found = struct.unpack(f"<{count}{code.decode()}", self._take(8 * count))
        return found if tag == b"t" else list(found)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise WireError("malformed message: it ends too early")
        found = self._content[self._at : end]
        self._at = end
        return found

    def _length(self) -> int:
        found: int = _LENGTH.unpack(self._take(4))[0]
        if found > len(self._content):
            raise WireError("malformed message: it cannot hold so many values")
        return found

    def _sized(self) -> bytes:
        return self._take(self._length())


def _cut(items: list[Any]) -> Iterator[Any]:
    yield from items
    raise WireError(f"only the first {ITEMS} items of an iterator are passed on")


def write(value: Any, keep: Callable[[Any], int] | None = None) -> bytes:
    """A value as a message; see :class:`Writer`."""
    return Writer(keep).bytes_of(value)


def read(content: bytes, hashed: bool = True) -> Any:
    """The value in a message; see :class:`Reader`."""
    return Reader(content, hashed).value()


def framed(content: bytes) -> bytes:
    """A message with its length before it, as it is sent over a pipe."""
    return _LENGTH.pack(len(content)) + content
