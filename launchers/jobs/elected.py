"""A recipe's job as one of several replicas: the replica that leads reports and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.techniques import make_passes
from meshpar.training.elastic import Replicas
from meshpar.training.metrics import Metrics, Reporter


def replica_problems(recipe: Recipe) -> Iterator[str]:
    """Yield what ``--elastic=replicas`` does not support in a recipe, one line each; the plan's and the data's own come with them."""
    for each in make_passes(recipe.passes):
        if not each.replicas_are_whole:
            yield (
                f"--elastic=replicas: {each.name}, as it is set, splits state over replicas, so the state of a lost replica would be lost; "
                "keep it whole (optimizer: replica), or run with --nodes MIN:MAX, which resumes from the newest checkpoint"
            )
    if recipe.teacher is not None:
        yield f"{recipe.where('teacher')}: --elastic=replicas does not support a teacher; remove one of the two"
    if recipe.training.balance_rate or recipe.training.balance_loss:
        yield (
            f"{recipe.where('training')}: --elastic=replicas sums gradients over replicas, but not the counts of chosen experts; set "
            "balance_rate and balance_loss to 0"
        )
    if recipe.kept != recipe.folder:
        yield f"{recipe.where('output')}: --elastic=replicas requires an output folder that every node sees, got {recipe.output}"
    if recipe.profile:
        yield f"{recipe.where('profile')}: --elastic=replicas writes no profile; set profile: false"
    if recipe.data.workers:
        yield f"{recipe.where('data.workers')}: --elastic=replicas reads data in the training process; set data.workers: 0"


@final
class Elected:
    """Reporters of this replica while it leads; another one's write to the same files before and after."""

    def __init__(self, replicas: Replicas, make: Callable[[int], Sequence[Reporter]]) -> None:
        """``make``: returns the reporters of a run that has made so many steps."""
        self._replicas, self._make = replicas, make
        self._reporters: Sequence[Reporter] = ()
        self._term = 0

    def report(self, record: Metrics) -> None:
        """Pass a record on if this replica leads."""
        for each in self._leading():
            each.report(record)

    def note(self, text: str) -> None:
        """Pass a line of text on if this replica leads."""
        for each in self._leading():
            each.note(text)

    def close(self) -> None:
        """Close what is open."""
        for each in self._reporters:
            each.close()
        self._reporters = ()

    def _leading(self) -> Sequence[Reporter]:
        if not self._replicas.leads or self._term != self._replicas.term:
            self.close()  # what was open before another one wrote is no longer the run's file
        if self._replicas.leads and not self._reporters:
            self._term = self._replicas.term
            self._reporters = self._make(self._replicas.step - bool(self._replicas.counted))
        return self._reporters
