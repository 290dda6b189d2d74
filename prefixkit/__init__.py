"""Cheap sampling of many sequences that share prefixes, from a Hugging Face model.

>>> model = prefixkit.patch(AutoModelForCausalLM.from_pretrained(name))
>>> result = prefixkit.generate(model, tokenizer, prompts, n=128, temperature=0.8)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkit import variants as variants
    from prefixkit.agreement import ProcessesDiffer as ProcessesDiffer
    from prefixkit.api import beam_search as beam_search
    from prefixkit.api import generate as generate
    from prefixkit.api import score as score
    from prefixkit.attention.queries import UnnumberedSequences as UnnumberedSequences
    from prefixkit.attention.variants import CAUSAL as CAUSAL
    from prefixkit.attention.variants import Variant as Variant
    from prefixkit.attention.variants import compose as compose
    from prefixkit.attention.variants import variant as variant
    from prefixkit.attention.variants.mod import BadVariant as BadVariant
    from prefixkit.attention.variants.tracing.untraceable import UntraceableVariant as UntraceableVariant
    from prefixkit.attention.variants.transforms import BadTransform as BadTransform
    from prefixkit.engine.policy import MemoryPolicy as MemoryPolicy
    from prefixkit.engine.request import BeamParams as BeamParams
    from prefixkit.engine.request import Request as Request
    from prefixkit.engine.request import Sample as Sample
    from prefixkit.engine.request import TokenEvent as TokenEvent
    from prefixkit.engine.scoring.score import Score as Score
    from prefixkit.engine.sharing_report import Report as Report
    from prefixkit.functional.attend import TreeAttention as TreeAttention
    from prefixkit.functional.attend import TreeStep as TreeStep
    from prefixkit.functional.attend import append as append
    from prefixkit.functional.attend import attend as attend
    from prefixkit.functional.attend import commit as commit
    from prefixkit.functional.attend import merge as merge
    from prefixkit.functional.attend import release_unseen as release_unseen
    from prefixkit.functional.build_trees import kv_pool as kv_pool
    from prefixkit.functional.build_trees import tree_from_parents as tree_from_parents
    from prefixkit.functional.build_trees import tree_from_tokens as tree_from_tokens
    from prefixkit.functional.cascade import tree_from_cascade as tree_from_cascade
    from prefixkit.functional.given_pages import kv_pool_from_tensors as kv_pool_from_tensors
    from prefixkit.functional.plan_step import plan as plan
    from prefixkit.functional.static_decode import StaticDecode as StaticDecode
    from prefixkit.functional.static_decode import static_decode as static_decode
    from prefixkit.kv.budget import KVBudgetTooSmall as KVBudgetTooSmall
    from prefixkit.kv.kv_pool import KVPool as KVPool
    from prefixkit.kv.kv_pool import KVPoolTooLarge as KVPoolTooLarge
    from prefixkit.kv.limits import DoesNotFit as DoesNotFit
    from prefixkit.kv.prefixes.file import PrefixFileError as PrefixFileError
    from prefixkit.kv.store import SpanTooLong as SpanTooLong
    from prefixkit.models.generate.tree_cache import TreeCache as TreeCache
    from prefixkit.models.model_errors import UnsupportedModel as UnsupportedModel
    from prefixkit.models.model_errors import UnsupportedVariant as UnsupportedVariant
    from prefixkit.models.patch import patch as patch
    from prefixkit.models.patch import patched as patched
    from prefixkit.models.patch import unpatch as unpatch
    from prefixkit.ops.arguments import BadDevice as BadDevice
    from prefixkit.ops.arguments import BadDtype as BadDtype
    from prefixkit.ops.arguments import BadShape as BadShape
    from prefixkit.ops.backend import BackendError as BackendError
    from prefixkit.ops.library import NoBackward as NoBackward
    from prefixkit.runners.decode_tree import BatchTooLarge as BatchTooLarge
    from prefixkit.sampling.params import SamplingParams as SamplingParams
    from prefixkit.session.call_results import MemoryReleased as MemoryReleased
    from prefixkit.session.call_results import Result as Result
    from prefixkit.session.call_results import SessionBusy as SessionBusy
    from prefixkit.session.search import ForeignNode as ForeignNode
    from prefixkit.session.search import NodeFinished as NodeFinished
    from prefixkit.session.search import NodeReleased as NodeReleased
    from prefixkit.session.search import SearchNode as SearchNode
    from prefixkit.session.session import Session as Session
    from prefixkit.session.session_memory import Pin as Pin
    from prefixkit.tree.pages import OutOfPages as OutOfPages
    from prefixkit.tree.radix import PrefixTree as PrefixTree


__version__ = "0.2.0"

# The module of each public name.  Modules load on first use, so that `prefixkit.tree` alone needs no torch, and the
# command line answers before transformers is imported.
_NAMES = {
    "prefixkit.agreement": ("ProcessesDiffer",),
    "prefixkit.api": ("beam_search", "generate", "score"),
    "prefixkit.attention.variants": ("CAUSAL", "Variant", "compose", "variant"),
    "prefixkit.engine.policy": ("MemoryPolicy",),
    "prefixkit.kv.prefixes.file": ("PrefixFileError",),
    "prefixkit.kv.store": ("SpanTooLong",),
    "prefixkit.engine.sharing_report": ("Report",),
    "prefixkit.engine.request": ("BeamParams", "Request", "Sample", "TokenEvent"),
    "prefixkit.functional.attend": (
        *("TreeAttention", "TreeStep", "append", "attend", "commit"),
        *("merge", "release_unseen"),
    ),
    "prefixkit.functional.build_trees": ("kv_pool", "tree_from_parents", "tree_from_tokens"),
    "prefixkit.functional.cascade": ("tree_from_cascade",),
    "prefixkit.functional.given_pages": ("kv_pool_from_tensors",),
    "prefixkit.functional.plan_step": ("plan",),
    "prefixkit.functional.static_decode": ("StaticDecode", "static_decode"),
    "prefixkit.kv.budget": ("KVBudgetTooSmall",),
    "prefixkit.kv.kv_pool": ("KVPool", "KVPoolTooLarge"),
    "prefixkit.engine.scoring.score": ("Score",),
    "prefixkit.models": ("TreeCache", "UnsupportedModel", "UnsupportedVariant", "patch", "patched", "unpatch"),
    "prefixkit.sampling.params": ("SamplingParams",),
    "prefixkit.session.search": ("ForeignNode", "NodeFinished", "NodeReleased", "SearchNode"),
    "prefixkit.session.session": ("Session",),
    "prefixkit.session.call_results": ("MemoryReleased", "Result", "SessionBusy"),
    "prefixkit.session.session_memory": ("Pin",),
    "prefixkit.attention.queries": ("UnnumberedSequences",),
    "prefixkit.attention.variants.tracing.trace": ("UntraceableVariant",),
    "prefixkit.attention.variants.transforms": ("BadTransform",),
    "prefixkit.attention.variants.variant": ("BadVariant",),
    "prefixkit.kv.limits": ("DoesNotFit",),
    "prefixkit.ops.arguments": ("BadDevice", "BadDtype", "BadShape"),
    "prefixkit.ops.backend": ("BackendError",),
    "prefixkit.ops.library": ("NoBackward",),
    "prefixkit.runners.decode_tree": ("BatchTooLarge",),
    "prefixkit.tree.pages": ("OutOfPages",),
    "prefixkit.tree.radix": ("PrefixTree",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted((*_HOME, "variants"))


def __getattr__(name: str) -> Any:
    if name == "variants":
        return import_module("prefixkit.variants")
    if name not in _HOME:
        raise AttributeError(f"module 'prefixkit' has no attribute {name!r}")
    import_module("prefixkit.backends")  # registers the backends
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
