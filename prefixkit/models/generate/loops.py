"""Whether modules of a looped model still run as often in a step as when rows started."""

from __future__ import annotations

from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.weights.state import plain_numbers


class Loops:
    """The loops of a model when rows start, as its ``facts`` say."""

    def __init__(self, facts: ModelFacts) -> None:
        self._model, self._computed_by = facts.inner, facts.probed.computed_by
        self._numbers = plain_numbers(facts.config)

    @property
    def changed(self) -> bool:
        """Whether modules run otherwise now: then the KV is of other passes than those that a step would make."""
        numbers = plain_numbers(self._model.config.get_text_config())  # takes far less time than the facts
        if numbers == self._numbers:
            return False
        try:
            same = facts_of(self._model).probed.computed_by == self._computed_by
        except UnsupportedModel:
            return True
        if same:
            self._numbers = numbers
        return not same
