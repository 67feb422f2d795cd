"""Which optimizers step shards as they step whole tensors, by a test of the rule."""

import functools
import importlib
import inspect

import pytest
import torch

from meshpar import FullyShard, MeshparError, Plan, TensorParallel
from meshpar.core import registry
from meshpar.launchers.jobs.build import own_optimizer
from meshpar.testing import on_ranks, random_tokens, token_loss_sum, whole
from meshpar.training.adamw_and_schedules import check_elementwise, use_evaluation_values
from tests.optim import given
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

EXACT = {
    "torch.optim": "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop SGD",
    "pytorch_optimizer": "Lion AdaBelief",
    "schedulefree": "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree",
}
REFUSED = {
    "torch.optim": "LBFGS Muon Rprop SparseAdam",
    "pytorch_optimizer": "Lamb",
    "schedulefree": "AdamWScheduleFreeClosure",
    "torchao.optim": "AdamW8bit AdamW4bit",
}


def cases(table):
    return [(package, name) for package, names in table.items() for name in names.split()]


def made(package, name):
    pytest.importorskip(package)
    return functools.partial(own_optimizer, registry.OPTIMIZER.find(f"{package}.{name}"), {"lr": 0.01})


@pytest.mark.parametrize(("package", "name"), cases(EXACT))
def test_an_elementwise_rule_is_accepted(package, name):
    check_elementwise(made(package, name))


@pytest.mark.parametrize(("package", "name"), daily(cases(REFUSED), *cases(REFUSED)[:6]))
def test_a_rule_across_elements_is_refused_with_the_reason(package, name):
    with pytest.raises(MeshparError, match=r"differs from its step on two parts|cannot be tried on a few numbers"):
        check_elementwise(made(package, name))


@pytest.mark.parametrize("name", ["schedulefree.AdamWScheduleFree", "pytorch_optimizer.Lion"])
def test_two_ranks_equal_one_process(name):
    pytest.importorskip(name.partition(".")[0])
    two_ranks_equal_one(name)


@on_ranks(2)
def two_ranks_equal_one(name):
    alone, split = transformer(), transformer()
    split.load_state_dict(alone.state_dict())
    par = Plan("dp_shard=2", [FullyShard()]).apply(split)
    found = []
    for module in (alone, par.module):
        optimizer = own_optimizer(registry.OPTIMIZER.find(name), {"lr": 1e-3, "weight_decay": 0.1}, module)
        getattr(optimizer, "train", lambda: None)()
        for step in range(3):
            loss, count = token_loss_sum(module, random_tokens(VOCAB, 2, 12, seed=step))
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        with use_evaluation_values(optimizer):
            found.append({key: whole(value).detach().clone() for key, value in module.named_parameters()})
    for key, value in found[0].items():  # Lion's signs follow the last bit of a gradient where moments are near 0
        close = (found[1][key] - value).abs() <= 1e-5 * value.abs().max()
        assert float(close.float().mean()) > (0.999 if name.endswith("Lion") else 0.99999), key


PACKAGES = ("torch.optim", "torchao.optim", "timm.optim", "pytorch_optimizer", "schedulefree")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_of_a_package_is_exact_or_refused(package, tmp_path):
    """Writes rows of the table in docs/optimizers.md into its folder (``--basetemp``)."""
    pytest.importorskip(package, exc_type=ImportError)
    every_class(package, tmp_path)


@on_ranks(2, timeout_s=900, fresh="optimizers of others compile, and keep what they made")
def every_class(package, folder):
    module = importlib.import_module(package)
    found = {"exact": [], "wrong": []}
    for name, kind in sorted(vars(module).items()):
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        if inspect.isabstract(kind) or name.startswith("_"):
            continue
        make = functools.partial(own_optimizer, registry.OPTIMIZER.find(f"{package}.{name}"), {"lr": 0.01})
        try:
            if kind is not torch.optim.Adafactor:  # which meshpar makes exact
                check_elementwise(make)
        except MeshparError as error:
            why = "an element depends on others" if "differs from its step" in str(error) else "cannot be tried"
            found.setdefault(why, []).append(name)
            continue
        try:
            far = max(distance(make, mesh, passes) for mesh, passes in MESHES.items())
        except Exception as error:
            found.setdefault(f"fails in the first step: {type(error).__name__}", []).append(name)
            continue
        found["exact" if far <= 1e-5 else "wrong"].append(name if far <= 1e-5 else f"{name} ({far:.0e})")
    if torch.distributed.get_rank() == 0:
        rows = [f"| {package} | {how} | {len(names)} | {', '.join(names)} |" for how, names in found.items() if names]
        (folder / "table.md").write_text("\n".join(rows) + "\n")
    assert not found["wrong"]
    assert found["exact"] or package == "torchao.optim"


MESHES = {"dp_shard=2": [FullyShard()], "tp=2": [TensorParallel()]}


def distance(make, mesh, passes):
    """Return the largest difference of a weight between a mesh and one process, as a part of the largest change."""
    with torch.random.fork_rng():
        alone = given.initial()
    before = {name: value.detach().clone() for name, value in alone.named_parameters()}
    par = given.on(mesh, passes)
    for one in (alone, par.module):
        optimizer = make(one)
        getattr(optimizer, "train", lambda: None)()
        given.advance(one, optimizer, range(4))
    far = 0.0
    for name, value in par.module.named_parameters():
        change = (dict(alone.named_parameters())[name].detach() - before[name]).abs().max()
        far = max(far, float((whole(value) - dict(alone.named_parameters())[name].detach()).abs().max() / change))
    return far


def test_schedulefrees_weights_for_evaluation_are_there_inside():
    kind = importlib.import_module(pytest.importorskip("schedulefree").__name__).SGDScheduleFree
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1)
    optimizer.train()
    for _ in range(3):
        weight.grad = torch.ones(4)
        optimizer.step()
    trained = weight.detach().clone()
    with use_evaluation_values(optimizer):
        assert not torch.equal(weight, trained)
    torch.testing.assert_close(weight.detach(), trained)
