"""Cheap sampling of many sequences that share prefixes, from a Hugging Face model.

>>> model = prefixkit.patch(AutoModelForCausalLM.from_pretrained(name))
>>> result = prefixkit.generate(model, tokenizer, prompts, n=128, temperature=0.8)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkit.api import beam_search, generate, score
    from prefixkit.engine.policy import MemoryPolicy
    from prefixkit.engine.request import BeamParams, Request, Sample, TokenEvent
    from prefixkit.engine.scoring.score import Score
    from prefixkit.engine.sharing_report import Report
    from prefixkit.kv.budget import KVBudgetTooSmall
    from prefixkit.kv.prefixes.file import PrefixFileError
    from prefixkit.models.generate.tree_cache import TreeCache
    from prefixkit.models.model_errors import UnsupportedModel
    from prefixkit.models.patch import patch, patched, unpatch
    from prefixkit.sampling.params import SamplingParams
    from prefixkit.session.call_results import MemoryReleased, Result, SessionBusy
    from prefixkit.session.search import ForeignNode, NodeFinished, NodeReleased, SearchNode
    from prefixkit.session.session import Session
    from prefixkit.session.session_memory import Pin

__version__ = "0.1.0"

# Where public names live.  They load on first use, so that `prefixkit.tree` alone needs no torch, and the command line
# answers before transformers is imported.
_NAMES = {
    "prefixkit.api": ("beam_search", "generate", "score"),
    "prefixkit.engine.policy": ("MemoryPolicy",),
    "prefixkit.kv.prefixes.file": ("PrefixFileError",),
    "prefixkit.engine.sharing_report": ("Report",),
    "prefixkit.engine.request": ("BeamParams", "Request", "Sample", "TokenEvent"),
    "prefixkit.kv.budget": ("KVBudgetTooSmall",),
    "prefixkit.engine.scoring.score": ("Score",),
    "prefixkit.models": ("TreeCache", "UnsupportedModel", "patch", "patched", "unpatch"),
    "prefixkit.sampling.params": ("SamplingParams",),
    "prefixkit.session.search": ("ForeignNode", "NodeFinished", "NodeReleased", "SearchNode"),
    "prefixkit.session.session": ("Session",),
    "prefixkit.session.call_results": ("MemoryReleased", "Result", "SessionBusy"),
    "prefixkit.session.session_memory": ("Pin",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BeamParams",
    "ForeignNode",
    "KVBudgetTooSmall",
    "MemoryPolicy",
    "MemoryReleased",
    "NodeFinished",
    "NodeReleased",
    "Pin",
    "PrefixFileError",
    "Report",
    "Request",
    "Result",
    "Sample",
    "SamplingParams",
    "Score",
    "SearchNode",
    "Session",
    "SessionBusy",
    "TokenEvent",
    "TreeCache",
    "UnsupportedModel",
    "beam_search",
    "generate",
    "patch",
    "patched",
    "score",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'prefixkit' has no attribute {name!r}")
    import_module("prefixkit.backends")  # registers them
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
