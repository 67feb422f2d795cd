"""Work beside the training: what is due is saved before it, and nothing in it ends or delays a run."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshpar import FullyShard, MeshparError, Parallelized
from meshpar.core.errors import RecipeError, ReplicaError
from meshpar.launchers.jobs import checks
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.testing import on_ranks
from meshpar.training import Samples, generate, log_likelihoods, validating
from meshpar.training.evaluation import cut_pair, cut_prompt, values_of
from meshpar.training.lighthouse import Together
from meshpar.training.metrics import JsonLines
from meshpar.training.settings import TrainSettings
from meshpar.training.stop import StopRequest
from tests.support.faults import Letters, forward
from tests.support.patience import patient, until
from tests.training.test_training import Kept, Records, assert_equal, packed, parallel, resumed, trainer, weights

Evaluates = Callable[[Parallelized], Any]


def evaluated(folder: Path, evaluation: Evaluates, par: Parallelized | None = None, **more: Any) -> Any:
    """Train six steps, with an evaluation after each second one, and return the trainer, the outcome and what was kept."""
    kept, heard = Kept(), Records()
    more = {"validate_every": 2, "checkpoint_every": 2, "checkpointer": kept, "reporters": [heard]} | more
    made = trainer(par or parallel(), packed(folder), evaluations={"mine": evaluation}, **more)
    return made, made.run(), kept, heard


def raises(par: Parallelized) -> Any:
    raise ConnectionError("no route")


def test_a_step_that_is_due_is_saved_before_an_evaluation_that_fails(one_process, tmp_path, caplog) -> None:
    made, outcome, kept, _ = evaluated(tmp_path, raises)
    assert (outcome.steps, sorted(kept.steps), made.ended) == (6, [2, 4, 6], "complete")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"evaluation mine failed after step {step}: rank 0: ConnectionError: no route; training continues"
        for step in (2, 4, 6)
    ]
    kept = Kept()
    with pytest.raises(MeshparError, match=r"no route\nthe run ends, because validation.on_error is stop"):
        evaluated(tmp_path, raises, on_error="stop", checkpoint_every=3, checkpointer=kept)
    assert sorted(kept.steps) == [2], "the step that was not due is saved before the run ends"


@pytest.mark.parametrize("found", [None, torch.tensor(1.0), [1.0], {"x": None}, {"x": torch.ones(3)}, "good"])
def test_rubbish_of_an_evaluation_is_named(found: Any) -> None:
    with pytest.raises(MeshparError, match=r"(it returned a|its value 'x' is a) \w+; expected a"):
        values_of(found)
    assert values_of({"x": torch.tensor(2.0), 3: True, "t": "text"}) == ({"x": 2.0, "3": 1.0}, {"t": "text"})


def test_a_number_that_is_none_is_told_and_is_no_metric_of_a_checkpoint(one_process: None, tmp_path: Path) -> None:
    _, outcome, _, heard = evaluated(tmp_path, lambda par: {"x": float("nan")})
    assert outcome.steps == 6 and "step 2: eval/mine/x is nan" in heard.notes


def test_what_an_evaluation_leaves_in_the_process_is_restored(one_process, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    errors = [asyncio.CancelledError(), BaseExceptionGroup("tasks", [SystemExit(2)]), ValueError("x")]

    def evaluation(par: Parallelized) -> Any:
        os.chdir("/")
        torch.set_grad_enabled(False)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        raise errors.pop()

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    _, outcome, kept, _ = evaluated(tmp_path, evaluation)
    assert (outcome.steps, sorted(kept.steps), errors) == (6, [2, 4, 6], [])
    assert (Path.cwd(), torch.is_grad_enabled()) == (tmp_path, True)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_after_an_evaluation_that_ignored_it_is_heard(one_process, tmp_path, number) -> None:
    class Kills(Records):
        def report(self, record: Mapping[str, float]) -> None:
            super().report(record)
            if record["step"] == 3:
                os.kill(os.getpid(), number)

    _, outcome, _, _ = evaluated(
        tmp_path, lambda par: {"x": bool(signal.signal(number, signal.SIG_IGN))}, reporters=[Kills()]
    )
    assert outcome.stopped == "SIGTERM" and outcome.steps < 6


@on_ranks(2)
def test_an_error_on_one_rank_ends_an_evaluation_on_all_and_changes_no_bit(tmp_path: Path) -> None:
    passes, calls = [FullyShard()], list[int]()

    def evaluation(par: Parallelized) -> Any:
        calls.append(1)
        forward(par)
        if dist.get_rank() == len(calls) % 2:  # of each rank in turn, before and after the last forward
            par.module.eval()
            raise OSError("shard 3 cannot be read")
        forward(par, times=len(calls) % 3)
        return {"x": 1.0}

    right = parallel("dp_shard=2", passes, dropout=0.2)
    evaluated(tmp_path, lambda par: {"x": 1.0}, right)
    par = parallel("dp_shard=2", passes, dropout=0.2)
    _, outcome, kept, heard = evaluated(tmp_path, evaluation, par)
    assert (outcome.steps, len(calls), sorted(kept.steps)) == (6, 3, [2, 4, 6])
    assert not any("eval/mine/x" in record for record in heard.records)
    assert_equal(weights(par), weights(right))
    check_one_that_fails_alone(tmp_path)
    check_a_signal_on_one_rank(tmp_path)
    check_errors_of_rank_0_are_shared()


def check_one_that_fails_alone(folder: Path) -> None:
    """In a forward, where the other rank waits: it ends after a bound, by name."""
    par = parallel("dp_shard=2", [FullyShard()])
    stop = StopRequest().__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validating, "_ALONE_S", 0.2)
        silent_s = patient(30)
        more: dict[str, Any] = {"moved": list, "before_exit": list, "silent_s": silent_s, "grace_s": 60}
        work = validating.SideWork(stop, par.module, in_step=True, **more)

        def act() -> None:
            work._inside = True
            raise RuntimeError("no memory")

        if dist.get_rank():
            with pytest.raises(MeshparError, match=r"mine failed on rank 1: RuntimeError: no memory, and the other"):
                work.run("mine", act, nullcontext())
        dist.barrier()
        stop.__exit__(MeshparError, None, None)


def check_a_signal_on_one_rank(folder: Path) -> None:
    """It is heard within a batch of what scores and generates, and the next start makes up for the evaluation."""
    for act in (
        lambda par: log_likelihoods(par, [([1, 2], [3])] * 4000, batch=1),
        lambda par: generate(par, [[1, 2]] * 4000, tokens=2, batch=1),
    ):
        calls = list[int]()

        def evaluation(par: Parallelized, act: Evaluates = act, calls: list[int] = calls) -> Any:
            par.module.register_forward_hook(lambda *_: calls.append(1))
            if dist.get_rank():
                os.kill(os.getpid(), signal.SIGTERM)
            act(par)
            return {"x": 1.0}

        par = parallel("dp_shard=2", [FullyShard()])
        made, outcome, kept, _ = evaluated(folder, evaluation, par)
        assert (outcome.stopped, outcome.steps, made.ended) == ("SIGTERM", 2, "stopped") and len(calls) < 10
        assert kept.steps[2][2]["owes"] == ["eval/mine/"]


def check_errors_of_rank_0_are_shared() -> None:
    together = Together(60.0)
    with pytest.raises(ReplicaError, match="rank 0 of this replica failed: ZeroDivisionError"):
        together.tell(lambda: 1 / 0)


def test_an_evaluation_that_a_signal_does_not_end_is_interrupted_and_the_step_is_saved(one_process, tmp_path) -> None:
    def sleeps(par: Parallelized) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    _, outcome, kept, _ = evaluated(tmp_path, sleeps, grace_s=0.2, checkpoint_every=None)
    assert (outcome.stopped, outcome.steps, sorted(kept.steps)) == ("SIGTERM", 2, [2])
    assert kept.steps[2][2]["owes"] == ["eval/mine/"]


def test_what_a_start_owes_is_made_once_more_and_no_third_time(one_process: None, tmp_path: Path) -> None:
    """One that ends the process each time would end each start before its first step."""

    class Died(KeyboardInterrupt): ...

    def dies(par: Parallelized) -> Any:
        raise Died

    kept = Kept()
    with pytest.raises(Died):
        evaluated(tmp_path, dies, checkpointer=kept)
    assert kept.steps[2][2]["owes"] == ["eval/mine/"]
    more: dict[str, Any] = {"validate_every": 2, "checkpoint_every": 2}
    with pytest.raises(Died):
        dying = {"evaluations": {"mine": dies}, "checkpointer": kept}
        resumed(parallel(), kept.steps[2], packed(tmp_path), **dying, **more).run()
    assert kept.steps[2][2]["makes_up"]
    heard = Records()
    more |= {"evaluations": {"mine": lambda par: {"x": 1.0}}, "reporters": [heard]}
    again = resumed(parallel(), kept.steps[2], packed(tmp_path), **more)
    assert again.run().steps == 6
    assert [record["step"] for record in heard.records if "eval/mine/x" in record] == [4, 6]


def test_an_evaluation_without_a_forward_moves_the_watchdog_until_its_bound(one_process, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(validating, "_LOOK_S", 0.01)
    seen = list[int]()

    def quiet(par: Parallelized) -> Any:
        before = made.validations.moves
        until(lambda: made.validations.moves > before + 5)
        time.sleep(patient(0.6))
        before = made.validations.moves
        time.sleep(0.2)
        seen.append(made.validations.moves - before)
        return {}

    made = trainer(parallel(), packed(tmp_path), evaluations={"mine": quiet}, steps=1, silent_s=patient(0.5))
    made.run()
    assert seen == [0]


def test_a_reporter_that_raises_ends_no_training(one_process, tmp_path, caplog) -> None:
    class Broken(Records):
        def report(self, record: Mapping[str, float]) -> None:
            raise ValueError("markup")

    heard = Records()
    run = trainer(parallel(), packed(tmp_path), reporters=[Broken(), heard])
    assert run.run().steps == 6 and len(heard.records) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "Broken raised ValueError: markup; training continues"
    ]


def test_a_validation_that_is_made_again_is_written_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for record in ({"step": 2, "train/loss": 1.0}, {"step": 2, "val/loss": 2.0}):
        lines.report(record)
    lines.close()
    again = JsonLines(tmp_path / "metrics.jsonl", step=2)
    for record in ({"step": 2, "val/loss": 2.0}, {"step": 2, "eval/mine/x": 1.0}, {"step": 4, "val/loss": 1.0}):
        again.report(record)
    again.close()
    assert [line.split(', "time')[0] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        '{"step": 2, "train/loss": 1.0',
        '{"step": 2, "val/loss": 2.0',
        '{"step": 2, "eval/mine/x": 1.0',
        '{"step": 4, "val/loss": 1.0',
    ]


def test_texts_longer_than_the_model_are_cut_at_their_beginning(one_process: None) -> None:
    assert cut_pair([*range(9)], [9], 6) == ([3, 4, 5, 6, 7, 8], [9])
    assert cut_pair([1, 2], [*range(9)], 4) == ([2], [5, 6, 7, 8])
    assert cut_prompt([*range(90)], 10, 32) == ([*range(68, 90)], 10)
    assert cut_prompt([*range(9)], 1280, 32) == ([*range(9)], 23)
    assert cut_prompt([*range(90)], 32, 32) == ([*range(74, 90)], 16)
    par = parallel()
    whole = cut_pair([*range(40)], [*range(5)], 32)
    assert len(whole[0]) + len(whole[1]) == 33, "one more than the model has positions: it does not read the last"
    assert log_likelihoods(par, [whole])[0][0] < 0


def test_a_prompt_without_tokens_is_refused_by_check_and_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model: {dim: 8, layers: 1, heads: 1, hidden: 8}\ntraining: {steps: 1}\n")
    recipe = load_recipe(file, ["evaluations={samples: {prompts: [a, '']}}"])
    facts = checks.JobFacts(recipe=recipe, ranks=1, replica=False, unseen=frozenset())
    assert [where for where, _ in checks._plugins(facts)] == ["evaluations.samples.prompts"]
    with pytest.raises(RecipeError, match="the prompt '' has no token"):
        Samples(Letters(), prompts=["a", ""])


def test_bounds_of_work_beside_the_training_are_checked() -> None:
    message = r"silent_s must be above 0.*grace_s must be above 0.*on_error is 'continue' or"
    with pytest.raises(RecipeError, match=message):
        TrainSettings(steps=1, silent_s=0, grace_s=-1, on_error="ignore")
