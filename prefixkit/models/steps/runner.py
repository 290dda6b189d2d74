"""A patched model as the function that the generation loop calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prefixkit.attention.step import Step
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models.experts import experts_by_ops, most_rows
from prefixkit.models.facts import ModelFacts, patched_facts, warn_of_moving_rotary
from prefixkit.models.families import pretrained_model
from prefixkit.models.model_calls import logits_of, no_lm_head, random_part
from prefixkit.models.model_errors import IncompleteStep, UnsupportedModel
from prefixkit.models.states.norms import norms_by_ops
from prefixkit.models.states.taken_cache import cache_keyword
from prefixkit.models.steps.layer_pages import layer_pages
from prefixkit.models.steps.step_cache import StepCache

if TYPE_CHECKING:
    from prefixkit.models.compile.gathered_head import GatheredHead
    from prefixkit.models.compile.layers import CompiledLayers
    from prefixkit.models.compile.packing import Compiler


class ModelRunner:
    """Runs steps through a patched model: a causal language model, or a model that returns only hidden states.

    Args:
        model: The model.
        pool: A pool made for the model's ``kv_spec``.
        compiled: Run the decoder layers through torch.compile: for steps of these numbers of rows, or of any (True).
            The model's first such step takes seconds; see :class:`CompiledLayers`.
        compiler: Compiles a layer's graph; None for ``compile_layer``, which uses Inductor.
        call: Calls the model; None: the model itself.  Inside a call of the model its hooks must not run again.
        facts: The model's facts, if the caller has them; None: they are read.

    Attributes:
        model: The patched model.
        cache: The cache that carries ``pool`` to its layers.
        vocab_size: Columns of the logits.
        compiled: The compiled layers, or None.

    Raises:
        NotPatched: ``patch(model)`` was not called.
        UnsupportedModel: see :func:`kv_spec`; or an adapter prepends learned tokens to every prompt.
        ValueError: the pool was made for a model of another shape.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: KVPool,
        compiled: bool | Container[int] = False,
        compiler: Compiler | None = None,
        call: Callable[..., Any] | None = None,
        facts: ModelFacts | None = None,
    ) -> None:
        facts = patched_facts(model) if facts is None else facts
        if facts.spec != pool.spec:
            raise ValueError(f"ModelRunner: the model needs a pool of {facts.spec}, got one of {pool.spec}")
        inner = facts.inner  # adapters wrap it and pass keywords on
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModel(
                f"ModelRunner: {type(model).__name__} puts learned tokens before every prompt "
                f"({type(model.active_peft_config).__name__}), which no tree holds; call model.generate(), or take an "
                "adapter of weights such as LoRA"
            )
        self._keeps_logits = "logits_to_keep" in inspect.signature(inner.forward).parameters
        self.model, self.call = model, model if call is None else call
        probed = facts.probed
        layers = layer_pages(facts.layers, facts.plan_kinds, pool, probed.numbers, probed.computed_by)
        self.cache = StepCache(pool, layers, facts.mixers)
        self.cache.keyword, self.cache.takes = cache_keyword(inner), None if facts.layers else inner
        self.cache.takes_offsets = probed.takes_offsets
        self._device, self._spread = pool.spec.device, facts.is_spread
        self._norms = norms_by_ops if facts.mixers else nullcontext
        self.vocab_size, self._looks_ahead = facts.vocab_size, bool(facts.looks_ahead)
        self._has_lm_head, self._body = inner.can_generate(), facts.body
        warn_of_moving_rotary(inner)
        # The most rows of a step in which our op runs the experts.
        self._most_rows = most_rows(facts.state.modules, pool.spec.device, pool.spec.compute_dtype)
        self.compiled: CompiledLayers | None = None
        self._head: GatheredHead | None = None
        if compiled is not False:
            from prefixkit.models.compile.gathered_head import gathered_head
            from prefixkit.models.compile.layers import CompiledLayers, compile_layer  # takes a second to import

            rows = None if compiled is True else compiled
            compiler = compile_layer if compiler is None else compiler
            self.compiled = CompiledLayers(model, self.cache, rows, compiler, self._most_rows)
            self._head = gathered_head(inner)
        self._turn: AbstractContextManager[object] = nullcontext() if self.compiled is None else self.compiled.made.lock

    def __call__(self, step: Step) -> Tensor:
        """Compute a step: write its KV to the pool, and return the logits of ``step.logit_rows``.

        Returns:
            Float32 ``[rows, vocab_size]`` on the first layer's device, an inference tensor: clone it before changing it
            in place outside of ``torch.inference_mode``.

        Raises:
            TypeError: the model has no language-model head.
            ValueError: the model is in training mode, and drops values at random.
            IncompleteStep: a layer did not run exactly once; or tokens see later ones, and the step does not say which.
        """
        with torch.inference_mode():
            return self.compute(step).float()

    def serves(self, step: Step, compiling: bool) -> bool:
        """See :meth:`CompiledLayers.serves`; False if layers are not compiled at all."""
        return self.compiled is not None and self.compiled.serves(step, compiling)

    def compute(self, step: Step) -> Tensor:
        """The same, but with logits in the dtype that the model returns."""
        if not self._has_lm_head:
            raise TypeError(f"ModelRunner: {no_lm_head(pretrained_model(self.model))}")
        kept = {"logits_to_keep": self._rows_to_keep(step)} if self._keeps_logits else {}

        def logits(**inputs: Any) -> Tensor | None:
            own_rows = step.own_logits and self._keeps_logits
            with nullcontext() if self._head is None else self._head.in_step(own_rows):
                found = logits_of(self.call(**inputs, **kept))
            return found if found is None or kept else found[:, step.logit_rows.to(found.device)]

        return self._run(step, logits)

    def hidden(self, step: Step) -> Tensor:
        """The same, but returns the last hidden states, ``[rows, hidden_size]``, which a head takes.

        Raises:
            UnsupportedModel: the model below the head returns none.
        """
        body = self._body

        def states(**inputs: Any) -> Tensor | None:
            found: Tensor | None = getattr(body(**inputs), "last_hidden_state", None)
            return None if found is None else found[:, step.logit_rows.to(found.device)]

        return self._run(step, states)

    def _rows_to_keep(self, step: Step) -> Any:
        """What the model is told of the rows whose logits are wanted.

        On several devices a tensor of rows would lie on another device than the rows that it selects; 0 means all rows.
        """
        if not self._spread:
            return step.logit_rows
        return 0 if len(step.logit_rows) == step.num_rows else step.logit_rows.tolist()

    def _run(self, step: Step, compute: Callable[..., Tensor | None]) -> Tensor:
        """Run a step through the model, or through a part of it with all attention layers."""
        if (dropout := random_part(self.model)) is not None:
            raise ValueError(
                f"ModelRunner: the model is in training mode, where {dropout} is random; call model.eval() first"
            )
        if self._looks_ahead and any(plan.tree.is_unbounded for plan in step.plans):
            raise IncompleteStep(
                "ModelRunner: under the model's variant tokens see later ones, and the step does not say how far: give "
                "the tree a spelling (prefixkit.tree.spelling), and choose_queries both"
            )
        experts = experts_by_ops() if step.num_rows <= self._most_rows else nullcontext()
        with self._turn, experts, self._norms(), torch.inference_mode():
            try:
                self.cache.begin(step)
                made = compute(**self.cache.inputs())
                self.cache.end()
            except BaseException:
                self.cache.abandon(step)
                raise
            if made is None:
                raise UnsupportedModel(f"{type(self.model).__name__} gives no last hidden states below its head")
            return made[0].to(self._device)
