"""Options that are more than a number or a name: escapes, shards, devices, a file of defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from prefixkit.evaluation.campaign.folder import Part

_ESCAPE = re.compile(r"\\(?:([nrt\\\"'0])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.?))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "'": "'", "0": "\0"}


def unescape(text: str, option: str) -> str:
    r"""``text`` with ``\n``, ``\t``, ``\r``, ``\\``, ``\xNN`` and ``\uNNNN`` as the characters that they stand for;
    ValueError for a backslash before something else.
    """

    def letter(found: re.Match[str]) -> str:
        if found[1]:
            return _LETTERS[found[1]]
        if found[4] is not None:
            raise ValueError(
                f"{option} {text!r}: {found[0]!r} stands for nothing; write \\n, \\t, \\r, \\xNN, \\uNNNN, or \\\\ "
                "for a backslash"
            )
        if 0xD800 <= (code := int(found[2] or found[3], 16)) <= 0xDFFF:
            raise ValueError(f"{option} {text!r}: {found[0]} is half a surrogate pair, which is not text")
        return chr(code)

    return _ESCAPE.sub(letter, text)


def parse_part(text: str) -> Part:
    """``i/n`` with i from 0; ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"--shard must be i/n with i from 0 to n - 1, such as 0/4; got {text}")
    from prefixkit.evaluation.campaign.folder import Part  # imports numpy, which ``--help`` does not need

    return Part(int(found[1]), int(found[2]))


def parse_token_ids(text: str | None) -> tuple[int, ...] | None:
    """Comma-separated numbers; None if none were given; ValueError for anything else."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", text, re.ASCII):
        raise ValueError(f"--stop-token-ids must be token ids with commas between them, such as 2,32000; got {text}")
    return tuple(int(one) for one in text.split(","))


def parse_devices(text: str) -> list[str]:
    """Comma-separated devices: ``0,1`` for the first two GPUs, or torch's names; ValueError if one is named twice."""
    found = [f"cuda:{one}" if one.isdigit() else one for one in (part.strip() for part in text.split(","))]
    if not all(found) or len({one for one in found if one != "cpu"}) < sum(one != "cpu" for one in found):
        raise ValueError(f"--devices must be different GPUs with commas between them, such as 0,1; got {text}")
    return found


def read_config(ctx: Any, parameter: Any, path: Path | None) -> Path | None:
    """Take a TOML file's values as the defaults of a command's options; options on the command line override them.

    Raises:
        ValueError: the file cannot be read, or names an option that the command does not have.
    """
    if path is None or ctx.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read the config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is no TOML: {error}") from error
    options = [one for one in ctx.command.params if one.name != parameter.name]
    known: dict[str, Any] = {name.lstrip("-"): one for one in options for name in one.opts}
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name not in known:
            raise typer.BadParameter(f"{path}: {key} is no option of {ctx.command_path}")
        option = known[name]
        if isinstance(value, dict) or (isinstance(value, list) and not option.multiple):
            raise typer.BadParameter(f"{path}: {key} must be one value, as on the command line")
        items = value if isinstance(value, list) else [value]
        if option.multiple and not all(isinstance(one, str) for one in items):
            raise typer.BadParameter(f"{path}: {key} must be a string in quotes or a list of them, got {value!r}")
        text = str(value).lower() if isinstance(value, bool) else str(value)  # as a user would type it: true is no 1
        defaults[option.name or name] = items if option.multiple else text
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path
