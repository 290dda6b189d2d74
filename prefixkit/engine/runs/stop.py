"""The end and the text of a sample: stop tokens, stop strings and decoding token by token."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prefixkit.engine.runs.detokenizer import Decode

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
_MOST_INCOMPLETE = 3  # tokens: a UTF-8 character has at most 4 bytes, so at most 3 tokens can wait for its last one


class StopChecker:
    """Follows one sample, token by token.

    Tokens become text with two offsets into the list::

        tokens   | committed ........ | context ....... | fresh ...... |
        offsets                       ^ _context        ^ _committed   ^ end

    The text of ``fresh`` is the text of ``context + fresh`` without the text of ``context``: the decoder sees the
    tokens before the new ones (spaces, merged bytes), and few tokens are decoded at a time.  Tokens are committed once
    their text no longer ends in an unfinished character.

    Stop strings are searched for in the text.  The text leaves special tokens out; a stop string that contains the text
    of a special token is searched for in the text with special tokens inserted where they were sampled, and the
    sample's text ends where the stop string begins.

    Args:
        stop_token_ids: Tokens that end the sample; the stop token belongs to the sample's tokens, not to its text.
        stop: Strings that end the sample; its text ends before the earliest of them.
        decode: Token ids to text, without special tokens.  ``None``: no text, and no stop strings.
        special_tokens: The text of each special token that ``decode`` leaves out, keyed by id.
        text: Whether to keep :attr:`so_far` up to date, token by token.

    Raises:
        ValueError: stop strings without ``decode``.
    """

    def __init__(
        self,
        stop_token_ids: Collection[int],
        stop: Collection[str],
        decode: Decode | None,
        special_tokens: Mapping[int, str] | None = None,
        text: bool = False,
    ) -> None:
        if stop and decode is None:
            raise ValueError(
                f"stop strings {tuple(stop)!r} need text, but there is no decode; "
                "pass a tokenizer's decode, or use stop_token_ids"
            )
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop = tuple(stop)
        self._follows = text or bool(stop)  # whether tokens are decoded one by one
        special = special_tokens or {}
        self._special_stop: tuple[str, ...] = ()
        self._plain_stop: tuple[str, ...] = ()
        if stop:
            self._special_stop = tuple(string for string in stop if any(text in string for text in special.values()))
            self._plain_stop = tuple(string for string in stop if string not in self._special_stop)
        self._special = special if self._special_stop else {}
        self._inserted: list[tuple[int, str]] = []  # the last special tokens: offset in the text, own text
        self._longest = max(map(len, self._stop), default=0)
        self._decode: Decode = decode or (lambda tokens: "")
        self._tokens: list[int] = []  # without a stop token
        self._context = self._committed = 0
        self._context_text = ""
        self._text = ""  # text of the committed tokens; after a stop string the whole text
        self._taken = 0  # characters that delta() has returned
        self._stopped_by_token = self._stopped_by_string = False

    def push(self, tokens: list[int]) -> bool:
        """Take tokens of which only the last can end the sample; returns True if it does.

        Tokens are decoded only if there are stop strings; all tokens before the last are decoded at once, except for
        special tokens.
        """
        stopped = self._stopped_by_token or self._stopped_by_string
        assert not stopped, "a stopped sample takes no more tokens"
        *before, last = tokens
        begin = 0
        for end, token in enumerate(before if self._follows else [], 1):
            if token in self._special or end == len(before):
                self._tokens += before[begin:end]
                self._commit(self._special.get(token, ""))
                begin = end
        self._tokens += before[begin:]
        if last in self._stop_token_ids:
            self._stopped_by_token = True
            return True
        self._tokens.append(last)
        if self._follows:
            self._commit(self._special.get(last, ""))
        return self._stopped_by_string

    def delta(self) -> str:
        """The text that has become certain since the last call: for streaming.

        Unfinished characters, and text that could be the beginning of a stop string, are held back until the sample has
        stopped.  After a sample that ends by length, :meth:`flush` returns the text still held back.
        """
        if self._stopped_by_token:
            return self.flush()
        if not self._follows:
            self._commit()
        sure = len(self._text) if self._stopped_by_string else len(self._text) - self._possible_stop()
        fresh = self._text[self._taken : sure]
        self._taken = max(self._taken, sure)
        return fresh

    def flush(self) -> str:
        """What :meth:`delta` still held back when the sample ended."""
        whole = self.text()
        fresh = whole[self._taken :]
        self._taken = len(whole)
        return fresh

    @property
    def so_far(self) -> str:
        """The text of the pushed tokens, without an unfinished character; up to date only with ``text=True``."""
        return self._text

    def text(self) -> str:
        """The sample's text: all its tokens decoded at once, or the text before the stop string."""
        return self._text if self._stopped_by_string else self._decode(self._tokens)

    def _commit(self, special: str = "") -> None:
        """Decode the fresh tokens, search for stop strings, and advance the offsets over finished characters.

        Args:
            special: The last token's own text, if it is a special token that the text leaves out.
        """
        text = self._fresh_text(len(self._tokens))
        # A special token cannot finish a character, so unfinished bytes before it are certain.
        certain = text if special else text.rstrip(_UNFINISHED)
        if special:
            # Each special token has at least one character, so a stop string spans at most its length of them.
            self._inserted = [*self._inserted[-self._longest :], (len(self._text) + len(certain), special)]
        if self._cut_at_stop(certain):
            return
        end = len(self._tokens)
        if text.endswith(_UNFINISHED):
            # Bytes before the last three tokens are not an unfinished character: they never form one.
            end -= _MOST_INCOMPLETE
            if end <= self._committed:
                return
            text = self._fresh_text(end)
            if self._cut_at_stop(text):  # a stop string may hold what decoders write for such bytes
                return
        if text:  # tokens without text, such as special ones, stay fresh, so that context always holds some text
            self._text += text
            self._context, self._committed = self._committed, end
            self._context_text = self._decode(self._tokens[self._context : self._committed])

    def _fresh_text(self, end: int) -> str:
        return self._decode(self._tokens[self._context : end])[len(self._context_text) :]

    def _cut_at_stop(self, fresh: str) -> bool:
        # The committed text contains no stop string, so a new one begins less than its length before the fresh text.
        begin = max(0, len(self._text) - self._longest + 1) if self._stop else 0
        window = self._text[begin:] + fresh
        found = [begin + at for at in map(window.find, self._plain_stop) if at >= 0]
        if self._special_stop:
            seen, place = self._with_special(window, begin)
            found += [place[at] for at in map(seen.find, self._special_stop) if at >= 0]
        if found:
            self._text = self._text[:begin] + window[: min(found) - begin]
            self._stopped_by_string = True
        return self._stopped_by_string

    def _with_special(self, text: str, begin: int) -> tuple[str, list[int]]:
        """``text``, from offset ``begin`` on, with its special tokens, and each character's offset without them."""
        seen, place, at, end = "", list[int](), begin, begin + len(text)
        if len(self._inserted) > self._longest:  # earlier ones may have been dropped
            at = max(at, self._inserted[0][0])
        for position, special in self._inserted:
            if begin <= position <= end:
                seen += text[at - begin : position - begin] + special
                place += [*range(at, position), *[position] * len(special)]
                at = position
        return seen + text[at - begin :], place + list(range(at, end))

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the committed text that is a prefix of a stop string."""
        most = min(self._longest - 1, len(self._text))
        held = _beginning(self._text, self._plain_stop, most)
        if self._special_stop:
            seen, place = self._with_special(self._text[len(self._text) - most :], len(self._text) - most)
            size = _beginning(seen, self._special_stop, self._longest - 1)
            held = max(held, len(self._text) - place[-size] if size else 0)
        return held


def _beginning(text: str, strings: Collection[str], most: int) -> int:
    """Length of the longest suffix of ``text``, up to ``most``, that is a prefix of one of the strings."""
    for size in range(min(most, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return size
    return 0
