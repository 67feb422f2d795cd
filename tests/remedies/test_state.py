"""Rows of `state`: see `tests/remedies/rows.py`."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshpar
from meshpar import FullyShard, ModelLayout, Plan, TensorParallel
from meshpar.checkpoints import CheckpointManager, export_safetensors
from meshpar.testing import on_ranks
from tests.passes.test_traps import Rotating, Weights
from tests.remedies.rows import Row, Tested, in_one_process, run_together
from tests.support.models_for_parity import huggingface, on_meta, transformer

SHARDED = "dp_shard=2", [FullyShard()]
SPLIT = "tp=2", [TensorParallel()]
IDS = torch.arange(16).view(2, 8)
ONES = torch.ones(2, 3)


# One process


def applied(module=None, layout=None):
    """Apply a plan to a layer in one process."""
    with meshpar.distributed("cpu"):
        return Plan("", []).apply(layer() if module is None else module, layout)


def layer():
    module = nn.Linear(3, 2, bias=False)
    nn.init.ones_(module.weight)
    return module


def read(stored, **options):
    """Read weights of a dtype into a layer."""
    par = applied(on_meta(layer))
    return par.materialize(weights=Stored(stored), **options).module.weight


class Stored(Weights):
    """Weights in a file, with their dtype."""

    def __init__(self, dtype):
        super().__init__({"weight": ONES.to(dtype)})

    def dtypes(self):
        return {name: tensor.dtype for name, tensor in self.tensors.items()}


def averaged_of_meta(**options):
    """Average a layer that is built on the meta device."""
    par = applied(on_meta(layer))
    if options:
        par.materialize(**options)
    return list(par.averaged(0.5).state_dict()["averages"])


def within(act):
    """Swap the average in, act inside of the block, and return the module's weight."""
    par = applied()
    average = par.averaged(0.5)
    average.update()
    with average.swapped():
        act(par, average)
    return par, average


def grown(par):
    with torch.no_grad():
        par.module.weight.add_(1.0)
    return par.module.weight


def sharded():
    return Plan(*SHARDED).apply(layer())


def copied():
    """Average a module and build a second one, instead of copies."""
    par, other = sharded(), sharded()
    grown(other)
    average = par.averaged(0.5)
    average.update()
    return [average.state_dict()["averages"]["weight"], other.module.weight, par.module.weight]


def table(build, layout=None):
    """Return the table of a block that a model on the meta device has, or one with values."""
    module = nn.Sequential(build())
    par = applied(module, layout)
    if any(tensor.is_meta for tensor in module.state_dict().values()):
        par.materialize(seed=0)
    return par.module[0].table


def fill(module):
    if isinstance(module, Rotating):
        module.table.copy_(torch.arange(4.0))
    else:
        module.reset_parameters()


# Two ranks


def trained(mesh=None, passes=()):
    """Return a model after a backward, under a plan or in one process, with its loss and an optimizer."""
    torch.manual_seed(0)
    module = transformer()
    par = None if mesh is None else Plan(mesh, list(passes)).apply(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return par, module, optimizer


def loss_of(module):
    return module(input_ids=IDS, labels=IDS).loss


def stepped(mesh=None, passes=()):
    par, module, optimizer = trained(mesh, passes)
    loss_of(module).backward()
    optimizer.step()
    return par, module, optimizer


def pickled():
    """Write shards as if they were the model."""
    torch.save(trained(*SHARDED)[1].state_dict(), "model.pt")


def saved_by_a_manager():
    CheckpointManager("run").save(1, trained(*SHARDED)[0], replace=True)
    par = trained(*SHARDED)[0]
    with torch.no_grad():
        par.module.norm.weight.zero_()
    CheckpointManager("run").restore(par)
    return par.module.norm.weight


def saved_whole():
    state = trained(*SHARDED)[0].state_dict(full=True)
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    dist.barrier()
    return torch.load("model.pt")["norm.weight"]


def loaded_parts():
    """Load this rank's parts of an optimizer's state as plain tensors."""
    state = stepped(*SHARDED)[2].state_dict()
    for moments in state["state"].values():
        moments["exp_avg"] = moments["exp_avg"].to_local()
    fresh = stepped(*SHARDED)[2]
    fresh.load_state_dict(dict(state))


def moment(optimizer):
    return optimizer.state_dict()["state"][0]["exp_avg"]


def loaded_whole():
    fresh = trained(*SHARDED)[2]
    fresh.load_state_dict(stepped()[2].state_dict())
    return moment(fresh)


def loaded_by_a_manager():
    par, _, optimizer = stepped(*SHARDED)
    CheckpointManager("optimizer").save(1, par, optimizer)
    par, _, fresh = trained(*SHARDED)
    CheckpointManager("optimizer").restore(par, fresh)
    return moment(fresh)


def pretrained(by_step):
    """Save a model of transformers, and return the weight that transformers loads."""
    import transformers

    torch.manual_seed(0)
    par = Plan(*SHARDED).apply(huggingface("Llama"))
    if not by_step:
        par.module.save_pretrained("theirs")
    CheckpointManager("theirs").save(1, par)
    if dist.get_rank() == 0:
        export_safetensors("theirs", "hf")
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained("hf").model.norm.weight


def gradient(take, mesh=None, passes=()):
    """Return a gradient, whole, of a plan or of one process."""
    par, module, _ = trained(mesh, passes)
    found = take(loss_of(module), module.norm.weight)
    return found if par is None else par.whole(found)


def by_autograd(loss, parameter):
    return torch.autograd.grad(loss, [parameter])[0]


def by_backward(loss, parameter):
    loss.backward()
    return parameter.grad


def number(read, mesh=None, passes=()):
    """Read a number after a step, of a plan or of one process."""
    return read(*stepped(mesh, passes)[:2])


def ratio(plan, process):
    return number(plan, *SHARDED) / number(process)


def norm_of_all(module):
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in module.parameters()]))


def built(seed=None):
    """Apply a plan to a layer that each rank drew, or that the plan draws."""
    if seed is not None:
        torch.manual_seed(seed)
    module = nn.Linear(4, 4) if seed is not None else on_meta(lambda: nn.Linear(4, 4))
    par = Plan(*SHARDED).apply(module)
    par = par if seed is not None else par.materialize(seed=0)
    par.check_replicas()
    return len(par.state_dict())


ROWS = [
    Tested("TensorParallel has nothing to do")
    .by("tests/passes/test_traps.py::test_a_model_of_peft_under_tp_names_add_adapters")
    .helps("for LoRA meshpar.training.add_adapters(model, LoRA(...))", "add_adapters(model, LoRA("),
    Tested("iterate over par.accumulate(micro_batches)")
    .by("tests/passes/test_traps.py::test_no_sync_names_accumulate_which_is_exact")
    .helps("iterate over par.accumulate(micro_batches)", "par.accumulate)"),
    Tested("call it before plan.apply")
    .by("tests/passes/test_traps.py::test_a_vocabulary_is_resized_before_apply")
    .helps("call it before plan.apply", "model.resize_token_embeddings(longer)"),
    Tested("save_pretrained does not support shards")
    .by("tests/passes/test_traps.py::test_save_pretrained_takes_a_whole_state_on_every_mesh")
    .helps("hand in whole tensors", "state_dict=par.state_dict(full=True))"),
    Tested("inside of par.offloaded(), where its parameters have no memory; call it after the block")
    .by("tests/state/test_offloading.py::test_what_would_use_lent_memory_is_refused")
    .helps("call it after the block", "CheckpointManager(tmp_path).save(1, par, optimizer)"),
    Tested("after par.offloaded() had failed to take memory back")
    .by("tests/state/test_offloading.py::test_a_return_that_fails_keeps_the_only_copy_and_can_be_tried_again")
    .helps("free the device's memory, then run `with par.offloaded(): pass`", "with par.offloaded():"),
    Tested(
        "par.offloaded() cannot take its memory back, and {} bytes stay in host memory ({}); free the device's memory"
    )
    .by("tests/state/test_offloading.py::test_a_return_that_fails_keeps_the_only_copy_and_can_be_tried_again")
    .helps("free the device's memory, then run `with par.offloaded(): pass`", "with par.offloaded():"),
    # Averages
    Row("an average got decay={} and power={}; pass one", result=[0, 0])
    .refuses(lambda: applied().averaged(0.9, power=1.0))
    .helps("pass one of them", lambda: [applied().averaged(0.9).updates, applied().averaged(power=1.0).updates]),
    Row(
        "has no values yet; call par.materialize(seed=...) or (weights=...) before averaging",
        result=["weight", "weight"],
    )
    .refuses(averaged_of_meta)
    .helps(
        "call par.materialize(seed=...) or (weights=...)",
        lambda: [*averaged_of_meta(seed=0), *averaged_of_meta(weights=Stored(torch.float32))],
    ),
    Row("{} was changed inside of swapped(), and the change is lost", result=2 * ONES)
    .refuses(lambda: within(lambda par, _: grown(par)))
    .helps("train after the block", lambda: grown(within(lambda par, _: par.module(ONES))[0])),
    Row("was called inside of swapped(), where the module holds", result=None)
    .refuses(lambda: within(lambda _, average: average.update()))
    .helps("call it after the with block", lambda: within(lambda *_: None)[1].update()),
    # Copies
    Row("a parallel module cannot be copied", result=[ONES, 2 * ONES, ONES], ranks=2)
    .refuses(lambda: [copy.deepcopy(sharded().module)])
    .helps("for averaged weights use par.averaged(decay), for a second model", copied),
    Row("this rank's shards, and pickling it", result=lambda: trained()[1].norm.weight, ranks=2)
    .refuses(pickled)
    .helps("use meshpar.checkpoints.CheckpointManager", saved_by_a_manager)
    .helps("save par.state_dict(full=True) of the module from rank 0", saved_whole),
    Row("{}'s {} has the shape {}; expected {}, which is the parameter's", result=lambda: moment(stepped()[2]), ranks=2)
    .refuses(loaded_parts)
    .helps("load whole tensors, as one process's optimizer.state_dict() has them", loaded_whole)
    .helps("restore the optimizer by meshpar.checkpoints.CheckpointManager", loaded_by_a_manager),
    Row("save_pretrained does not support shards", result=lambda: huggingface("Llama").model.norm.weight, ranks=2)
    .refuses(lambda: pretrained(by_step=False))
    .helps("use meshpar.checkpoints: CheckpointManager(...).save", lambda: pretrained(by_step=True)),
    # Numbers and gradients
    Row("a DTensor whose ranks hold parts of it was read as a number", result=1.0, ranks=2)
    .refuses(lambda: number(lambda par, module: module.norm.weight.sum().item(), *SHARDED))
    .helps(
        "use par.whole(tensor).item() on every rank",
        lambda: ratio(
            lambda par, module: par.whole(module.head.weight.sum()).item(),
            lambda _, module: module.head.weight.sum().item(),
        ),
    )
    .helps(
        "par.clip_grad_norm_(float('inf')) for the norm of all gradients",
        lambda: ratio(lambda par, _: float(par.clip_grad_norm_(float("inf"))), lambda _, module: norm_of_all(module)),
    ),
    Row(
        "DistributedDataParallel would average what the plan has averaged",
        result=lambda: float(loss_of(trained()[1])),
        ranks=2,
    )
    .refuses(lambda: DistributedDataParallel(trained(*SHARDED)[1]))
    .helps("call par.module without it", lambda: float(loss_of(trained(*SHARDED)[0].module))),
    Row("find no gradients of parameters that data ranks share", result=lambda: gradient(by_autograd), ranks=2)
    .refuses(lambda: gradient(by_autograd, *SHARDED))
    .helps("use loss.backward() and read parameter.grad", lambda: gradient(by_backward, *SHARDED))
    .helps("a mesh of tensor parallelism alone", lambda: gradient(by_autograd, *SPLIT)),
    Tested("gradients on several meshes")
    .by(
        "tests/passes/experts/test_parallel.py::"
        "test_what_a_model_does_with_its_experts_equals_one_process_or_is_refused_on_all_ranks"
    )
    .helps("call par.clip_grad_norm_(max_norm), which clips by one norm", "par.clip_grad_norm_(1.0)"),
    # Initial values
    Row("call torch.manual_seed(0) on every rank before building the module", result=2, ranks=2)
    .refuses(lambda: built(dist.get_rank()))
    .helps("call torch.manual_seed(0) on every rank", lambda: built(0))
    .helps('build it under torch.device("meta") and call par.materialize(seed=0)', built),
    Tested("are one tensor in this model and differ in these weights")
    .by("tests/state/test_initialize.py::test_a_tied_tensor_may_come_under_each_of_its_names_but_with_one_value")
    .helps("build the model untied", "replace(QWEN3, tied=False)")
    .helps("choose one: ignore=[...] leaves the other unread", 'ignore=["lm_head"]'),
    Row("whose values may need scales that are stored beside them", result=ONES)
    .refuses(lambda: read(torch.float8_e4m3fn))
    .helps("give weights in a wider floating-point dtype", lambda: read(torch.bfloat16))
    .helps("cast=True to take the bare values", lambda: read(torch.float8_e4m3fn, cast=True)),
    Row("{} ({}) has no initialisation for", result=torch.arange(4.0))
    .refuses(lambda: table(lambda: on_meta(lambda: Rotating(resets=False))))
    .helps("give the class a reset_parameters() that fills them", lambda: table(lambda: on_meta(Rotating)))
    .helps(
        "pass ModelLayout(init=...)",
        lambda: table(lambda: on_meta(lambda: Rotating(resets=False)), ModelLayout(init=fill)),
    )
    .helps("build the model with weights instead of on meta", lambda: table(lambda: Rotating(resets=False))),
]


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks(tmp_path):
    run_together(ROWS, 2, tmp_path)
