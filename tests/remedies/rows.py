"""The table of remedies: every message of the source that tells its reader what to do, and code that does it.

``messages.py`` reads the messages and their remedies from the source. A file ``test_SUBJECT.py`` has rows::

    # a part of the message, {} for what is filled in; what each remedy gives; ranks that run it together
    Row("the layout is {} of type {}; expected a ModelLayout", result=(), ranks=2)
    .refuses(lambda: problems("dp_shard=2", [FullyShard()], layout={}))
    .helps("write ModelLayout(", lambda: problems(..., layout=ModelLayout(blocks=("layers.*",))))

``refuses`` gets what meets the message: it raises, warns or returns texts. ``helps`` gets the first words of a remedy, one
for each alternative ("use A, or B"), and functions that do literally what they say, each in its way. Where a test does so
already, the row names it: ``Tested(message).by("tests/F.py::test_name").helps("use A", "piece of the test's source that
uses A")``; the message's text must be in the test, too.

To add rows: ``python -m tests.remedies.table`` prints what is untried; write a row for each line, and run its file and
``tests/core/test_house.py``. Remedies that no test can apply are kinds of ``OUTSIDE`` in ``table.py``, each with its reason.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from meshpar.tensors.placements import whole_tensor


@dataclass(frozen=True, slots=True)
class Row:
    """A message, the code that meets it, and its remedies, each followed to the letter.

    Attributes:
        message: a part of the message as the source has it, ``{}`` for what is filled in. It may be in several messages.
        result: what each remedy gives, or a function that computes it; ``()`` for the problems of what is accepted.
        ranks: the number of ranks that run the row together; 0: this process.
        refused: what the message refuses: it raises, warns, or returns the texts of problems.
        remedies: the first words of each remedy that the message prints -> functions that do what they say.
    """

    message: str
    result: Any = ()
    ranks: int = 0
    refused: Callable[[], Any] = list
    remedies: Mapping[str, Sequence[Callable[[], Any]]] = field(default_factory=dict)

    def refuses(self, function: Callable[[], Any]) -> Self:
        return replace(self, refused=function)

    def helps(self, words: str, *functions: Callable[[], Any]) -> Self:
        return replace(self, remedies={**self.remedies, words: functions})

    def run(self) -> None:
        said = _said(self.refused)
        parts = [re.escape(part) for part in self.message.split("{}")]
        assert re.search(".*?".join(parts), said, re.DOTALL), f"expected {self.message!r}, got:\n{said}"
        for words, remedy in ((words, remedy) for words, ways in self.remedies.items() for remedy in ways):
            try:
                _check_equal(remedy(), self.result() if callable(self.result) else self.result)
            except Exception as error:
                error.add_note(f"the remedy {words!r} of the message {self.message!r}")
                raise


@dataclass(frozen=True, slots=True)
class Tested:
    """A message whose printed remedies another test applies: its source has the message, and what each remedy says."""

    __test__ = False  # of pytest: no class of tests
    message: str

    def by(self, test: str) -> Self:
        """Name the test, such as ``tests/core/test_plan.py::test_an_unknown_style``."""
        return self

    def helps(self, words: str, piece: str) -> Self:
        """Name the first words of a remedy, and the piece of the test's source that does what they say."""
        return self


Loop = partial(Row, result=None, ranks=2)
"""A row whose remedies are loops on two ranks, which return what differs from one process."""
TwoRanks = partial(Row, result=True, ranks=2)
"""A row whose remedies two ranks run; each returns whether all is as it should be."""


def each(function: Callable[[Any], Iterable[Any]], *cases: Any) -> Callable[[], list[Any]]:
    """Return what a function gives for one case after another, as one list, when it is called."""
    return lambda: [problem for case in cases for problem in function(case)]


def alone(rows: Iterable[Row | Tested]) -> list[Any]:
    """Return the rows that one process runs, for ``pytest.mark.parametrize("row", ...)``."""
    return [pytest.param(row, id=row.message[:60]) for row in rows if isinstance(row, Row) and row.ranks == 0]


def in_one_process(rows: Iterable[Row | Tested]) -> Callable[..., None]:
    """Return the test that runs the rows of one process, each in a folder of its own."""

    @pytest.mark.parametrize("row", alone(rows))
    def test(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        row.run()

    return test


def run_together(rows: Iterable[Row | Tested], ranks: int, folder: Path | str = ".") -> None:
    """Run the rows of so many ranks in ``folder``, one after another: the body of a test ``@on_ranks(ranks)``."""
    failures = []
    with contextlib.chdir(folder):
        for row in rows:
            if isinstance(row, Row) and row.ranks == ranks:
                torch.manual_seed(0)
                try:
                    row.run()
                except Exception as error:  # all rows that fail are told at once
                    failures.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    assert not failures, "\n\n".join(failures)


def heard_from(job: Callable[[], Any]) -> list[str]:
    """Run something and return what it warns of."""
    return _heard(job)[1]


def _said(refused: Callable[[], Any]) -> str:
    """Return what a refusal says: its error, or its problems, and the warnings before."""

    def meet() -> Any:
        try:
            return refused()
        except Exception as error:  # the message is what counts
            return "\n".join([str(error), *getattr(error, "__notes__", ())])

    found, heard = _heard(meet)
    return "\n".join([*([found] if isinstance(found, str) else map(str, found or ())), *heard])


def _heard(job: Callable[[], Any]) -> tuple[Any, list[str]]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshpar").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = job()
    finally:
        logging.getLogger("meshpar").removeHandler(handler)
    return result, [*heard, *(str(warning.message) for warning in caught)]


def _check_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        assert set(found) == set(expected)
        for name in expected:
            _check_equal(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        found = list(found)
        assert len(found) == len(expected), f"expected {expected}, got {found}"
        for one, other in zip(found, expected, strict=True):
            _check_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(whole_tensor(found), whole_tensor(expected), rtol=1e-5, atol=1e-6)
    elif isinstance(expected, float):
        torch.testing.assert_close(float(found), expected, rtol=1e-5, atol=1e-6)
    else:
        assert found == expected, f"expected {expected!r}, got {found!r}"
