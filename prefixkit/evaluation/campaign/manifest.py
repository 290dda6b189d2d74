"""The manifest that identifies a campaign's samples: two runs of one manifest give the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.evaluation.tasks.typed import made

FORMAT = 1
Value = str | float | bool | list[str] | None  # of a sampling parameter
_SAID = {"fingerprint": "weights or tokens that end samples, of fingerprint"}


class OtherCampaign(ValueError):
    """A run folder holds the samples of another model, of other prompts or of other parameters."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a campaign.

    Attributes:
        id: The problem's id.
        sha256: SHA-256 of its token ids, as little-endian int32.
        tokens: The number of its tokens.
        occurrence: How many prompts before it, in the whole input, have the same tokens.
        params: Its own sampling parameters, which replace the campaign's.
    """

    id: str | int
    sha256: str
    tokens: int
    occurrence: int
    params: Mapping[str, Value]


@dataclass(frozen=True)
class Manifest:
    """All that a campaign's samples depend on; the number of samples is not part of it.

    Attributes:
        model: The name or folder that was given.
        dtype: The model's dtype, and that of K and V if it differs.
        fingerprint: A hash of the model's weights, and of the tokens that end its samples
            (``models/weights/model_fingerprint.py``).
        tokenizer: SHA-256 of the tokenizer and its chat template.
        chat: Whether prompts went through the chat template.
        params: The sampling parameters of all prompts, without ``n``.
        logprobs: Whether samples carry log-probabilities.
        prompts: The prompts, in the order of the input.
        versions: Versions of the packages that computed the first samples: differences are logged, not refused.
    """

    model: str
    dtype: str
    fingerprint: str
    tokenizer: str
    chat: bool
    params: Mapping[str, Value]
    logprobs: bool
    prompts: tuple[Prompt, ...]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        rows = asdict(self)
        prompts = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows.pop("prompts"))
        head = json.dumps({"format": FORMAT, **rows}, ensure_ascii=False, indent=1)
        return f'{head[:-2]},\n "prompts": [\n  {prompts}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            ValueError: ``text`` is no manifest, or one of another version of prefixkit.
        """
        try:
            record = json.loads(text)
            written = record.pop("format")
            found = made(cls, record) if written == FORMAT else None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} is no manifest of a campaign ({type(error).__name__}: {error}); restore it, or sample into "
                "another folder"
            ) from error
        if found is None:
            said = str(written)[:20]
            raise ValueError(f"{where} has format {said}, and this prefixkit reads {FORMAT}; use the other one")
        if len({one.id for one in found.prompts}) < len(found.prompts):
            raise ValueError(f"{where} has two prompts of one id; restore it, or sample into another folder")
        return found

    def check_same(self, now: Manifest, where: str, known: Sequence[str] = ()) -> None:
        """Raise OtherCampaign, with the first difference, unless ``now`` gives the samples that this manifest gives.

        Args:
            now: The manifest of the present command.
            where: The run folder.
            known: The only fields to compare; none: all.
        """
        for name in known or [one.name for one in fields(self) if one.name not in ("versions", "model")]:
            before, wanted = getattr(self, name), getattr(now, name)
            if before == wanted:
                continue
            if name == "prompts":
                said = _difference_of_prompts(before, wanted)
            elif name == "params":
                said = ", ".join(f"{key} {before[key]!r}" for key in before if before[key] != wanted.get(key, ...))
                said += " there, and now " + ", ".join(
                    f"{key} {wanted[key]!r}" for key in wanted if wanted[key] != before.get(key, ...)
                )
            else:
                short = [one[:12] if isinstance(one, str) else one for one in (before, wanted)]  # hashes are shortened
                said = f"{_SAID.get(name, name)} {short[0]!r} there, and now {short[1]!r}"
            raise OtherCampaign(f"{where} holds samples of another campaign: {said}; choose another folder for --run")


def _difference_of_prompts(before: Sequence[Prompt], now: Sequence[Prompt]) -> str:
    if len(before) != len(now):
        return f"{len(before)} prompts there, and now {len(now)}"
    place = next(i for i, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
    one, other = before[place], now[place]
    if one.id != other.id:
        return f"prompt {place} is {one.id!r} there, and now {other.id!r}"
    if one.params != other.params:
        return f"{one.id!r} has the parameters {dict(one.params)} there, and now {dict(other.params)}"
    now_has = other.tokens if one.tokens != other.tokens else "others"
    return f"the prompt of {one.id!r} has {one.tokens} tokens there, and now {now_has}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of all in a tokenizer's files that decides how text and messages become tokens."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    whole = core.to_str() if core is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = getattr(tokenizer, "chat_template", None)
    special = sorted((str(key), str(value)) for key, value in tokenizer.special_tokens_map.items())
    return hashlib.sha256(json.dumps([whole, template, special], default=str).encode()).hexdigest()


def describe_prompts(
    ids: Sequence[str | int], tokens: Sequence[NDArray[np.int32]], params: Sequence[Mapping[str, Any]]
) -> tuple[Prompt, ...]:
    """The prompts of a manifest, equal ones numbered over the whole input."""
    seen: dict[str, int] = {}
    prompts = []
    for id, own, each in zip(ids, tokens, params, strict=True):
        digest = hashlib.sha256(np.ascontiguousarray(own, dtype="<i4").data).hexdigest()
        prompts.append(Prompt(id, digest, len(own), seen.get(digest, 0), dict(each)))
        seen[digest] = prompts[-1].occurrence + 1
    return tuple(prompts)
