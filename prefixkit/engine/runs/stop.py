"""When a sample ends, and what its text is: stop tokens, stop strings and decoding token by token."""

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

    The text of ``fresh`` is that of ``context + fresh`` less that of ``context``: a decoder sees what stands before
    the new tokens (spaces, merged bytes), and only a few tokens are decoded at a time.  Tokens are committed once their
    text no longer ends in an unfinished character.

    A stop string is looked for in the text.  One that holds the text of a special token, which the text leaves out, is
    looked for in the text with the special tokens put in where they were sampled; the text then ends where it begins.

    Args:
        stop_token_ids: Tokens that end the sample; the one pushed belongs to its tokens, not to its text.
        stop: Strings that end the sample; its text ends before the earliest of them.
        decode: Token ids to text, without special tokens.  ``None``: no text, and no stop strings.
        special_tokens: The text of tokens that ``decode`` leaves out, by their ids.
        text: Keep :attr:`so_far` up to date, token by token.

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
        self._follows = text or bool(stop)  # whether text is made token by token
        special = special_tokens or {}
        self._special_stop = tuple(string for string in stop if any(text in string for text in special.values()))
        self._plain_stop = tuple(string for string in stop if string not in self._special_stop)
        self._special = special if self._special_stop else {}
        self._inserted: list[tuple[int, str]] = []  # the last special tokens: where in the text, and their own
        self._longest = max(map(len, self._stop), default=0)
        self._decode: Decode = decode or (lambda tokens: "")
        self._tokens: list[int] = []  # without a stop token
        self._context = self._committed = 0
        self._context_text = ""
        self._text = ""  # of the committed tokens, and after a stop string: the whole text
        self._taken = 0  # characters that delta() has handed out
        self._stopped_by_token = self._stopped_by_string = False

    def push(self, tokens: list[int]) -> bool:
        """Take tokens of which only the last can end the sample; True if it does.

        Decodes only where there are stop strings, what stands before the last token at once except for special tokens.
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

        Held back are unfinished characters and whatever could be the beginning of a stop string; once the sample has
        stopped, nothing is.  A sample that ends by length has :meth:`rest` left.
        """
        if self._stopped_by_token:
            return self.rest()
        if not self._follows:
            self._commit()
        sure = len(self._text) if self._stopped_by_string else len(self._text) - self._possible_stop()
        fresh = self._text[self._taken : sure]
        self._taken = max(self._taken, sure)
        return fresh

    def rest(self) -> str:
        """What :meth:`delta` still held back when the sample ended."""
        whole = self.text()
        fresh = whole[self._taken :]
        self._taken = len(whole)
        return fresh

    @property
    def so_far(self) -> str:
        """The text of the tokens pushed, without a character that is unfinished; kept where ``text`` was asked for."""
        return self._text

    def text(self) -> str:
        """The sample's text: all its tokens decoded at once, or what stands before the stop string."""
        return self._text if self._stopped_by_string else self._decode(self._tokens)

    def _commit(self, special: str = "") -> None:
        """Decode the fresh tokens, look for stop strings, and move the offsets over what is finished.

        Args:
            special: The last token's own text, where the text leaves it out.
        """
        text = self._fresh_text(len(self._tokens))
        # Bytes before a special token are no character that it could finish.
        certain = text if special else text.rstrip(_UNFINISHED)
        if special:
            # Each has a character at least, so no stop string reaches further back than its length in tokens.
            self._inserted = [*self._inserted[-self._longest :], (len(self._text) + len(certain), special)]
        if self._cut_at_stop(certain):
            return
        end = len(self._tokens)
        if text.endswith(_UNFINISHED):
            # Older than the last three tokens, it is no unfinished character but bytes that never were one.
            end -= _MOST_INCOMPLETE
            if end <= self._committed:
                return
            text = self._fresh_text(end)
        if text:  # tokens without text, such as special ones, stay fresh, so that context always holds some text
            self._text += text
            self._context, self._committed = self._committed, end
            self._context_text = self._decode(self._tokens[self._context : self._committed])

    def _fresh_text(self, end: int) -> str:
        return self._decode(self._tokens[self._context : end])[len(self._context_text) :]

    def _cut_at_stop(self, fresh: str) -> bool:
        # No stop string lies within the committed text, so a new one begins at most its length before the fresh text.
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
        """``text``, which begins at ``begin``, with its special tokens put in, and each character's place in it."""
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
        """Length of the longest end of the committed text that a stop string begins with."""
        most = min(self._longest - 1, len(self._text))
        held = _beginning(self._text, self._plain_stop, most)
        if self._special_stop:
            seen, place = self._with_special(self._text[len(self._text) - most :], len(self._text) - most)
            size = _beginning(seen, self._special_stop, self._longest - 1)
            held = max(held, len(self._text) - place[-size] if size else 0)
        return held


def _beginning(text: str, strings: Collection[str], most: int) -> int:
    """Length of the longest end of ``text``, up to ``most``, that one of the strings begins with."""
    for size in range(min(most, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return size
    return 0
