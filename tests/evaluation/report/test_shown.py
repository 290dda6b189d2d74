"""Texts of others are visible and end nothing."""

import unicodedata

from prefixkit.cli.terminal import _UNSAFE
from prefixkit.evaluation.report.shown import code, cut, cut_end, marked, visible


def test_hidden_characters_are_written_as_escapes():
    assert visible("a\x00\x1b\x7f\x85\n\u202e\ud800\u2028b") == r"a\u0000\u001b\u007f\u0085\n\u202e\ud800\u2028b"
    assert visible("\U000e0041\u200b\ufeff") == r"\udb40\udc41\u200b\ufeff"


def test_what_the_terminal_escapes_and_what_has_no_glyph_is_escaped():
    for number in range(0x110000):
        letter = chr(number)
        if unicodedata.category(letter) in {"Cc", "Zl", "Zp", "Cs"} or _UNSAFE.match(letter):
            assert letter not in visible(letter), hex(number)
    formats = [chr(n) for n in range(0x110000) if unicodedata.category(chr(n)) == "Cf"]
    # Format characters that are drawn: signs that stand over numbers, and Egyptian joiners.
    drawn = {one for one in formats if one in visible(one)}
    assert all(unicodedata.bidirectional(one) in {"AN", "L"} for one in drawn)


def test_letters_of_all_scripts_stay():
    assert visible("żółw 木 שלום 😀 é") == "żółw 木 שלום 😀 é"


def test_code_keeps_lines_and_marks_what_is_hidden():
    assert code("a\r\n\tb", 100) == "a\n\tb"
    assert code("x\x00\x1by<", 100) == 'x<b class="hidden">\\u0000\\u001b</b>y&lt;'
    assert code("\r", 9) == '<b class="hidden">\\r</b>'


def test_what_is_marked_can_be_told_from_every_text():
    assert marked("a\x01b\x02\u202e\x00<", 100) == "a\x01\\u0001\x02b\x01\\u0002\\u202e\\u0000\x02<"


def test_long_texts_lose_their_middle_or_their_end():
    text = cut("a" * 100_000 + "z", 300)
    assert len(text) < 350 and "99,701 characters" in text and text.endswith("z")
    assert cut_end("abcdef", 4) == "abc…" and cut_end("abcd", 4) == "abcd"
