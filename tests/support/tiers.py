"""Which cases of a claim ``make test`` runs: one of each kind; ``make test-all`` runs every one."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], *chosen: Any, ids: Callable[[Any], str] | None = None) -> list[Any]:
    """Return the cases of a parametrization, of which ``make test`` runs the chosen ones; a tuple is several values."""
    cases = list(cases)
    missing = [name for name in chosen if name not in cases]
    assert not missing, f"{missing} are no cases of {cases}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=ids and ids(case),
            marks=[] if case in chosen else [pytest.mark.nightly],
        )
        for case in cases
    ]
