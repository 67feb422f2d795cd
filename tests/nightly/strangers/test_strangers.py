"""Models of other libraries in two lines; without ``-m`` a few under FSDP and Replicate."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshpar.testing import RankFailure, launch
from tests.nightly.strangers.claims import CLAIMS, MESHES, SECONDS, run_cases
from tests.nightly.strangers.models import STRANGERS

SHORT_MESHES = ("FSDP", "Replicate")
DATA_MESHES = (*SHORT_MESHES, "HSDP")
TENSOR_MESHES = ("TP", "FSDP x TP")

Case = tuple[str, str, str]


def cases() -> list[Case]:
    """Return (claim, model, mesh) of everything that is claimed."""
    return [
        (claim, name, mesh)
        for claim in CLAIMS
        for name, stranger in STRANGERS.items()
        for mesh in (*DATA_MESHES, *(TENSOR_MESHES if stranger.layout is not None else ()))
    ]


def marked(case: Case) -> object:
    claim, name, mesh = case
    short = STRANGERS[name].short and mesh in SHORT_MESHES
    return pytest.param(case, id=f"{claim}-{name}-{mesh}", marks=[] if short else [pytest.mark.long])


@pytest.fixture(scope="module")
def verdict_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], str]:
    """Return a look-up of results; the first that asks runs all cases of as many ranks in one group."""
    selected = [
        item.callspec.params["case"] for item in request.session.items if getattr(item, "originalname", "") == CLAIM
    ]
    known: dict[Case, str] = {}

    def look_up(case: Case) -> str:
        if case not in known:
            ranks = MESHES[case[2]][0]
            pending = [
                other
                for other in selected
                if MESHES[other[2]][0] == ranks and other not in known and installed(other[1])
            ]
            while pending:
                known.update(measured(pending, ranks, tmp_path_factory.mktemp("strangers")))
                pending = [other for other in pending if other not in known]
        return known[case]

    return look_up


def installed(name: str) -> bool:
    return not STRANGERS[name].needs or importlib.util.find_spec(STRANGERS[name].needs) is not None


def measured(pending: list[Case], ranks: int, folder: Path) -> dict[Case, str]:
    """Run cases in a group until one breaks it; return their results, and that one's failure."""
    failure = ""
    try:
        launch(
            run_cases.__module__,
            run_cases.__qualname__,
            ranks,
            (pending, str(folder)),
            timeout_s=SECONDS * (1 + len(pending)),
        )
    except RankFailure as error:
        failure = str(error)
    found: dict[Case, str] = {}
    for number, case in enumerate(pending):
        report = folder / f"{number}.json"
        result = json.loads(report.read_text()) if report.exists() else None
        if result is None:
            break
        found[case] = f"broke its group of ranks: {failure}" if result == "began" else result
    # Ranks that do not start will not start for the next case either.
    return found or dict.fromkeys(pending, f"the ranks did not start: {failure}")


CLAIM = "test_it_equals_one_process"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_it_equals_one_process(case: Case, verdict_of: Callable[[Case], str]) -> None:
    needs = STRANGERS[case[1]].needs
    if needs and not installed(case[1]):
        pytest.skip(f"needs {needs}; install the extras strangers and strangers-vision")
    verdict = verdict_of(case)
    assert not verdict, verdict
