"""Rows of `checkpoints` but for its exports (`test_exports.py`): see `tests/remedies/rows.py`."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import meshpar
from meshpar import CheckpointError, FullyShard, Plan
from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    Safetensors,
    TorchWeights,
    list_steps,
    pin_step,
    prune_steps,
)
from meshpar.checkpoints.steps.inspecting import remove_step
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.launchers.cli import app
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job, linear
from tests.checkpoints.test_foreign import VALUES, Runs
from tests.checkpoints.test_foreign import equal as is_read
from tests.checkpoints.test_foreign import linear as read
from tests.remedies.rows import Row, Tested, in_one_process, run_together

STEP = "run/step-00000001"


def manager(**options):
    return CheckpointManager("run", **options)


def saved(*steps, job=None, root="run", **options):
    """Save steps, and return those that are there."""
    with CheckpointManager(root) as made:
        for step in steps:
            made.save(step, job or linear(step), **options)
        return made.steps()


def restored(**options):
    """Restore a step, and return its number."""
    return manager().restore(linear(), **options).step


def given(folder="hf", suffix="safetensors", **tensors):
    """Write a file of weights, and return its folder."""
    path = Path(folder) / f"model.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    (save_file if suffix == "safetensors" else torch.save)(tensors or dict(VALUES), path)
    return folder


def imported(path):
    """Import weights by the command line; return whether the step has them."""
    given_config = Path(path if Path(path).is_dir() else Path(path).parent) / "config.json"
    given_config.write_text('{"model_type": "own"}')
    done = CliRunner().invoke(app, ["import", str(path), "steps", "--model", "transformers"])
    assert done.exit_code == 0, done.output
    par = read()
    CheckpointManager("steps").restore(par)
    shutil.rmtree("steps")
    return is_read(par)


def by_accelerate(kind):
    """Save a model as accelerate's FSDP does, and return its folder."""
    import logging

    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model

    module = nn.Sequential(nn.Linear(3, 2))
    module.load_state_dict(VALUES)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    with mock.patch("accelerate.utils.fsdp_utils.logger", logging.getLogger("accelerate")):
        save_fsdp_model(plugin, SimpleNamespace(process_index=0, num_processes=1), module, "theirs")
    return "theirs"


def distributed():
    """Save a distributed checkpoint of torch, and return its folder."""
    dcp.save(dict(VALUES), checkpoint_id="dcp", no_dist=True)
    return "dcp"


def twice(kind, suffix):
    """Read a folder in which two files have one tensor."""
    given("two", suffix)
    shutil.copy(f"two/model.{suffix}", f"two/other.{suffix}")
    return kind("two")


def once(kind, suffix):
    Path(f"two/other.{suffix}").unlink()
    return is_read(read(kind("two")))


def with_code():
    """Save a file that has other objects than tensors."""
    torch.save({"state": dict(VALUES), "code": Runs()}, "model.pt")
    return TorchWeights("model.pt")


def state_alone():
    torch.save(torch.load("model.pt", weights_only=False)["state"], "state.pt")
    return is_read(read(TorchWeights("state.pt")))


def indexed(*, missing=False):
    """Read files with an index, of which one is missing or cut."""
    given("hub", **VALUES)
    shutil.rmtree("here", ignore_errors=True)
    shutil.copytree("hub", "here")
    index = {"weight_map": dict.fromkeys(VALUES, "model.safetensors") | ({"1.weight": "other"} if missing else {})}
    Path("here/model.safetensors.index.json").write_text(json.dumps(index))
    return is_read(read(Safetensors("here")))


def cut():
    """Read a file that is cut."""
    path = Path(given("hub")) / "model.safetensors"
    shutil.copytree("hub", "here")
    Path("here/model.safetensors").write_bytes(path.read_bytes()[:-4])
    return Safetensors("here")


def again(*, index=True):
    """Copy the folder again, or remove its index; return whether its weights are read."""
    if index:
        shutil.copytree("hub", "here", dirs_exist_ok=True)
        Path("here/model.safetensors.index.json").unlink(missing_ok=True)
    else:
        Path("here/model.safetensors.index.json").unlink()
    return is_read(read(Safetensors("here")))


def renamed():
    """Give a step another name."""
    saved(1)
    Path(STEP).rename("run/step-00000005")
    return restored()


def named_back():
    Path("run/step-00000005").rename(STEP)
    return restored()


def damaged(name):
    """Cut a file of the newer of two steps."""
    saved(1, 2)
    path = next(Path("run/step-00000002").glob(name))
    path.write_bytes(path.read_bytes()[:9])
    return restored()


class Counting(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        raise AssertionError(state)


def saved_with(module, **options):
    """Save a module, and return the extra data that a restore gives."""
    manager().save(1, Job(module(3, 2)), **options)
    return manager().restore(Job(module(3, 2))).extra


def with_buffer(tensor, *, persistent=True):
    """Save a module with a buffer."""
    module = nn.Linear(3, 2)
    module.register_buffer("odd", tensor, persistent=persistent)
    return saved(1, job=Job(module), replace=True)


def sparse():
    return torch.eye(3).to_sparse()


def unmade(verb, *, call=None):
    """Save, restore or publish a model, or do so once it has memory."""
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    with meshpar.distributed("cpu"):
        par = Plan("", []).apply(module)
        if call is not None:
            call(par)
        return verb(par)


def optimizer_of(parameters):
    """Save a model with an optimizer of parameters."""
    with meshpar.distributed("cpu"):
        before = nn.Linear(3, 2)
        par = Plan("", []).apply(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(parameters(before, par), lr=0.1)
        return manager().save(1, par, optimizer).name


def pinned():
    """Remove a step that is pinned."""
    saved(1, 2)
    pin_step(STEP)
    return remove_step(STEP)


def unpinned():
    done = CliRunner().invoke(app, ["checkpoints", "pin", "--unpin", STEP])
    assert done.exit_code == 0
    return remove_step(STEP)


def best(name):
    """Save steps with a metric, and return the best one."""
    made = CheckpointManager("run", best=name)
    for step, loss in ((1, 1.0), (2, 2.0)):
        made.save(step, linear(), metrics={"validation_loss": loss, "loss": loss}, replace=True)
    return made.best()


def listed(root):
    """List steps, and keep the newest."""
    return [len(list_steps(root).splitlines()), prune_steps(root, 2)[-4:]]


def run_folder():
    saved(1, 2, root="job/checkpoints")
    return "job"


def staging(root, **options):
    """Make a manager that stages."""
    with CheckpointManager(root, **options) as made:
        return str(made.root).removeprefix(f"{Path.cwd()}/")


# Ranks


def of_this_rank(values):
    """Return the value of this rank."""
    return values[dist.get_rank()]


def parallel():
    torch.manual_seed(0)
    return Plan("dp_shard=2", [FullyShard()]).apply(nn.Linear(4, 4))


def together(save):
    """Save on each rank, and return what a restore gives."""
    with CheckpointManager("ranks") as made:
        save(made)
        found = made.restore(parallel())
        return found.step, found.extra, found.rank_extra


def not_shared():
    """Save where the folder of rank 0 is not on this rank."""
    here = of_this_rank([DiskPath.is_dir, lambda path: False])
    with mock.patch.object(DiskPath, "is_dir", here):
        CheckpointManager("ranks").save(3, parallel())


ROWS = [
    # Formats
    Tested("saved with SerializationFormat.SAFETENSORS, which is not read")
    .by("tests/checkpoints/test_foreign.py::test_safetensors_in_a_distributed_checkpoint_are_named")
    .helps("save it as TORCH_SAVE", "serialization_format=SerializationFormat.TORCH_SAVE"),
    Tested("DistributedCheckpoint(folder / '{}', prefix='model.'), or")
    .by("tests/checkpoints/test_foreign.py::test_a_checkpoint_of_trainers_fsdp_is_read_and_imported_as_the_error_says")
    .helps(
        "read it by DistributedCheckpoint(folder / ",
        'DistributedCheckpoint(folder / "pytorch_model_fsdp_0", prefix="model.")',
    )
    .helps("convert it by meshpar import with --config FOLDER", '"--config", str(base)]).exit_code == 0'),
    Row("it has a file for each rank of accelerate's FSDP", result=True)
    .refuses(
        lambda: (
            Path(given(suffix="bin"), "model.bin").rename("hf/pytorch_model_fsdp_0_rank0.bin") and TorchWeights("hf")
        )
    )
    .helps(
        "save it with the state_dict_type SHARDED_STATE_DICT",
        lambda: is_read(
            read(DistributedCheckpoint(f"{by_accelerate('SHARDED_STATE_DICT')}/pytorch_model_fsdp_0", prefix="model."))
        ),
    ),
    Row("it is a distributed checkpoint of torch", result=True)
    .refuses(lambda: Safetensors(distributed()))
    .helps("read it by DistributedCheckpoint(folder)", lambda: is_read(read(DistributedCheckpoint("dcp")))),
    Row("it has parts of a distributed checkpoint of torch", result=True)
    .refuses(lambda: Safetensors(f"{distributed()}/__0_0.distcp"))
    .helps(
        "read the folder with .metadata by DistributedCheckpoint",
        lambda: is_read(read(DistributedCheckpoint(next(Path().rglob(".metadata")).parent))),
    ),
    Row("it has safetensors: read them by", result=True)
    .refuses(lambda: TorchWeights(given()))
    .helps("read them by Safetensors(path)", lambda: is_read(read(Safetensors("hf"))))
    .helps("convert them by meshpar import", lambda: imported("hf")),
    Row("it has files of torch.save: read them by", result=True)
    .refuses(lambda: Safetensors(given(suffix="pt")))
    .helps("read them by TorchWeights(path)", lambda: is_read(read(TorchWeights("hf/model.pt"))))
    .helps("convert them by meshpar import", lambda: imported("hf/model.pt")),
    Row("{} is in {} and in another file of {}", result=True)
    .refuses(lambda: twice(TorchWeights, "pt"))
    .helps("remove one of them", lambda: once(TorchWeights, "pt")),
    Row("contains other objects than tensors and plain data", result=True)
    .refuses(with_code)
    .helps("load the file where you trust it, and save the state_dict alone", state_alone),
    Row("{} and {} both have", result=True)
    .refuses(lambda: twice(Safetensors, "safetensors"))
    .helps("remove one of the files", lambda: once(Safetensors, "safetensors")),
    Row("; copy it again from its source", result=True).refuses(cut).helps("copy it again from its source", again),
    Row("copy the folder again from its source, or remove", result=True)
    .refuses(lambda: indexed(missing=True))
    .helps("remove the index to read the files that are there", lambda: again(index=False))
    .helps("copy the folder again from its source", again),
    Row("it was renamed or replaced; rename it back", result=1).refuses(renamed).helps("rename it back", named_back),
    Row("{} cannot be read: expected {} as JSON", result=1)
    .refuses(lambda: damaged("meshpar.json"))
    .helps("restore another step, with restore(step=...)", lambda: min(restored(step=1), restored(fallback=True))),
    Row("{} is damaged; restore an earlier step:", result=1)
    .refuses(lambda: damaged("*.distcp"))
    .helps("restore an earlier step:", lambda: restored(step=1)),
    Tested("differ from the plan; save again:")
    .by(
        "tests/checkpoints/test_planning.py::"
        "test_a_later_save_is_checked_as_the_first_and_files_may_be_laid_out_in_another_way"
    )
    .helps("save again:", "assert records_of_a_save(3) == 0"),
    Tested("is damaged: {}, bytes {} to {}: expected the CRC-32")
    .by("tests/checkpoints/test_damage.py::test_a_flipped_bit_is_found_by_default_and_the_step_before_taken_when_asked")
    .helps("use an earlier step", "manager.restore(job, fallback=True)"),
    Tested("copy the checkpoint with its files")
    .by("tests/checkpoints/test_damage.py::test_a_link_in_the_place_of_a_file_is_refused")
    .helps("copy the checkpoint with its files, such as by cp -L", '["cp", "-rL"'),
    Tested("{} was written while it was read")
    .by(
        "tests/checkpoints/test_copying.py::"
        "test_a_file_that_is_written_during_the_copy_is_an_error_although_its_sum_may_be_right"
    )
    .helps("run this again when no other process writes it", "Copier(again.extend,"),
    Tested("check the credentials in the store's usual environment")
    .by("tests/jobs/test_object_store.py::test_a_store_that_refuses_is_no_damage_that_is_passed_over")
    .helps(
        "check the credentials in the store's usual environment", "restore(Job(Filled(0.0)), fallback=True).step == 2"
    ),
    Tested("was replaced while it was read")
    .by("tests/jobs/test_object_store.py::test_an_object_that_is_replaced_is_not_read_as_a_mixture")
    .helps("read it again when no other job writes it", "again = objects.ReadObject(path)"),
    Tested("a URL is no pattern")
    .by(
        "tests/jobs/test_object_store.py::"
        "test_data_is_copied_once_with_what_belongs_to_it_and_again_when_it_has_changed"
    )
    .helps("write a folder", 'fetched(data / "folder", tmp_path)'),
    # Steps
    Tested("save in the background is lost")
    .by("tests/jobs/test_object_store.py::test_a_save_whose_program_ended_without_close_is_told_as_lost")
    .helps("call close() of the CheckpointManager at the end", '"background.close()"'),
    Row("has no checkpoints; give a run's folder", result=[3, "1, 2"])
    .refuses(lambda: listed("absent"))
    .helps("give a run's folder", lambda: listed(run_folder()))
    .helps("its folder of checkpoints", lambda: listed("job/checkpoints")),
    Row(
        "{} does not name one step; give its folder",
        result=lambda: f"removed step 2 from {Path('run').absolute()}; left: 1",
    )
    .refuses(lambda: saved(1, 2) and remove_step("run"))
    .helps("give its folder, such as {}", lambda: remove_step("run/step-00000002")),
    Row("is pinned; unpin it first", result=lambda: f"removed step 1 from {Path('run').absolute()}; left: 2")
    .refuses(pinned)
    .helps("unpin it first (meshpar checkpoints pin --unpin)", unpinned),
    Tested("; end that job")
    .by(
        "tests/checkpoints/test_lease.py::"
        "test_a_second_job_is_told_who_writes_the_folder_and_gets_it_when_that_one_is_killed"
    )
    .helps("train in another folder", 'CheckpointManager(tmp_path / "other")'),
    Row("staging is for saves to a URL", result="run")
    .refuses(lambda: staging("run", async_=True, staging="disk"))
    .helps("drop staging", lambda: staging("run", async_=True)),
    Row("staging is for saves in the background", result="s3://bucket/run")
    .refuses(lambda: staging("s3://bucket/run", staging="disk"))
    .helps("pass async_=True", lambda: staging("s3://bucket/run", async_=True, staging="disk"))
    .helps("drop staging", lambda: staging("s3://bucket/run")),
    Row("this manager has no metric", result=1)
    .refuses(lambda: best(None))
    .helps("pass best='validation_loss'", lambda: best("validation_loss"))
    .helps("another name that save(metrics=) receives", lambda: best("loss")),
    Row("tensors have no memory yet", result=["step-00000001", "step-00000001", ["bias", "weight"]])
    .refuses(
        lambda: [
            message
            for verb in (lambda par: manager().save(1, par), lambda par: saved(1) and manager().restore(par), published)
            for message in refusals(lambda verb=verb: unmade(verb))
        ]
    )
    .helps(
        "call par.materialize() before",
        lambda: [
            unmade(lambda par: manager().save(1, par, replace=True).name, call=materialize),
            manager().steps() and unmade(lambda par: manager().restore(par).folder.name, call=materialize),
            unmade(published, call=materialize),
        ],
    ),
    Tested("tensors were changed while the save in the background copied them")
    .by("tests/checkpoints/test_async.py::test_a_change_of_a_shard_before_it_is_copied_fails_the_save_on_every_rank")
    .helps("call before_step() of the CheckpointManager", "manager.before_step()"),
    Row("these entries of the state_dict are not tensors", result={"seen": 3})
    .refuses(lambda: saved_with(Counting))
    .helps("pass them to save(extra=) instead", lambda: saved_with(nn.Linear, extra={"seen": 3})),
    Row("parameters that the module does not have", result="step-00000001")
    .refuses(lambda: optimizer_of(lambda before, par: before.parameters()))
    .helps(
        "build it after plan.apply, from par.module.parameters()",
        lambda: optimizer_of(lambda before, par: par.module.parameters()),
    ),
    Row("a checkpoint stores dense tensors", result=[1])
    .refuses(lambda: with_buffer(sparse()))
    .helps("dequantize these tensors (or make them dense)", lambda: with_buffer(sparse().to_dense()))
    .helps("exclude them from checkpoints", lambda: with_buffer(sparse(), persistent=False)),
    Row("step {} {} in {}; save another step", result=[1, 2])
    .refuses(lambda: saved(1) and saved(1))
    .helps("save another step", lambda: saved(2))
    .helps("pass replace=True", lambda: saved(1, replace=True)),
    # Ranks
    Tested("restore() got")
    .by("tests/checkpoints/test_identity.py::test_ranks_that_restore_different_steps_are_told")
    .helps("pass the same arguments on every rank", "assert manager.restore(par, step=1).step == 1"),
    Tested("not the same step on rank 0 and on rank")
    .by("tests/checkpoints/test_identity.py::test_ranks_that_restore_different_steps_are_told")
    .helps("use a file system that all ranks share", "assert manager.restore(par).step == 2"),
    Tested("this rank saves step {}, rank 0 step")
    .by("tests/checkpoints/test_identity.py::test_ranks_that_save_different_steps_are_told")
    .helps("pass the same step on every rank", "manager.save(3, par)"),
    Row("is another on rank {} than on rank 0", result=lambda: (1, {}, {"rank": dist.get_rank()}), ranks=2)
    .refuses(lambda: together(lambda made: made.save(1, parallel(), extra={"rank": dist.get_rank()})))
    .helps(
        "pass what differs between ranks, such as",
        lambda: together(lambda made: made.save(1, parallel(), rank_extra={"rank": dist.get_rank()}, replace=True)),
    ),
    Row("{}, created by rank 0, does not exist here", result=(3, {}, None), ranks=2)
    .refuses(not_shared)
    .helps("use a file system that all ranks share", lambda: together(lambda made: made.save(3, parallel()))),
]


def refusals(job):
    try:
        job()
    except CheckpointError as error:
        yield error


def materialize(par):
    par.materialize(seed=0)


def published(par):
    return sorted(dict(par.published()))


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks(tmp_path):
    run_together(ROWS, 2, tmp_path)
