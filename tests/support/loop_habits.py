"""What ordinary training loops do, a function a habit, the same in one process and on a plan's ranks."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, pad
from torch.utils.checkpoint import checkpoint

from meshpar import MeshparError, ModelLayout
from meshpar.passes.tensor.random import SplitState
from meshpar.tensors.placements import local_tensor
from meshpar.testing import whole
from tests.support.loop_sides import CLASSES, DIM, FEATURES, LAYOUT, Block, Net, Side, adamw, batch, sgd, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A row of the table; ``refused``: one process has nothing to compare, so the habit must be refused."""

    group: str
    title: str
    run: Callable[[Side], None]
    tolerance: float
    refused: bool
    limit_s: float


HABITS: dict[str, Habit] = {}
CONTROLS: dict[str, Habit] = {}
"""Habits with a fault of their own, which no table may let pass."""
CONTROL = "control"


def habit(group: str, title: str, *, tolerance: float = 1e-9, refused: bool = False, limit_s: float = 60.0):
    def keep(run: Callable[[Side], None]) -> Callable[[Side], None]:
        (CONTROLS if group == CONTROL else HABITS)[run.__name__] = Habit(
            group=group, title=title, run=run, tolerance=tolerance, refused=refused, limit_s=limit_s
        )
        return run

    return keep


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


FORWARD = "Forward and backward"


@habit(FORWARD, "`torch.autocast` around the forward (bfloat16)", tolerance=3e-2)
def autocast(side):
    net = side.apply(side.net().float())

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x.float()).double()

    train(side, net, sgd(net), forward=forward)


@habit(FORWARD, '`torch.compile(module, backend="eager")`', limit_s=120.0)
def compiled_eager(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=torch.compile(net, backend="eager"))


@habit(FORWARD, '`torch.compile(module, backend="aot_eager")`', limit_s=120.0)
def compiled_aot(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=torch.compile(net, backend="aot_eager"))


class Checkpointed(Net):
    """Calls ``torch.utils.checkpoint`` itself, as many models do."""

    reentrant = False

    def encode(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


def two_forwards(net):
    """A forward in two halves, so that one backward follows two forwards."""
    return lambda x: torch.cat([net(half) for half in x.chunk(2)])


@habit(FORWARD, "the model calls `checkpoint(block, x, use_reentrant=False)`")
def checkpointed(side):
    net = side.apply(side.net(Checkpointed))
    train(side, net, sgd(net))


@habit(FORWARD, "`checkpoint(..., use_reentrant=False)`, two forwards before a backward")
def checkpointed_twice(side):
    net = side.apply(side.net(Checkpointed))
    train(side, net, sgd(net), forward=two_forwards(net))


@habit(FORWARD, "the model calls `checkpoint(block, x, use_reentrant=True)`")
def reentrant(side):
    net = side.apply(side.net(Reentrant))
    train(side, net, sgd(net))


@habit(FORWARD, "`checkpoint(..., use_reentrant=True)`, two forwards before a backward")
def reentrant_twice(side):
    net = side.apply(side.net(Reentrant))
    train(side, net, sgd(net), forward=two_forwards(net))


@habit(FORWARD, "two forwards before a backward")
def forwards_twice(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=two_forwards(net))


@habit(FORWARD, "gradient penalty: `autograd.grad(..., create_graph=True)` over the input, then backward")
def gradient_penalty(side):
    net = side.apply(side.net())
    optimizer = sgd(net)

    def penalised(x, y):
        out = net(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, y) + 0.1 * grad.square().sum(-1).mean()

    for x, y in side.steps(net, optimizer):
        side.loss(side.backward(net, penalised, x.requires_grad_(), y))


@habit(FORWARD, "`torch.autograd.grad(loss, module.parameters())` instead of `loss.backward()`")
def gradients_by_autograd(side):
    net = side.apply(side.net())
    for x, y in side.batches():
        parameters = list(net.parameters())
        grads = torch.autograd.grad(mse_loss(net(x), y), parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads):
                parameter -= 0.1 * grad
    side.weights(net)


@habit(FORWARD, "`torch.func.functional_call(module, weights, x)` with whole weights")
def functional_call(side):
    weights = {name: 2 * parameter.detach() for name, parameter in side.net().named_parameters()}
    net = side.apply(side.net())
    for x, _ in side.batches(1):
        side.note_rows("output", torch.func.functional_call(net, weights, (x,)))


@habit(FORWARD, "`net.head = nn.Linear(...)` between two steps")
def new_head(side):
    net = side.apply(side.net())
    train(side, net, adamw(net))
    torch.manual_seed(2)
    net.head = nn.Linear(DIM, CLASSES).double()
    train(side, net, adamw(net))


@habit(FORWARD, "a larger `net.embed` (more tokens) between two steps")
def new_tokens(side):
    net = side.apply(side.net())
    train(side, net, adamw(net))
    torch.manual_seed(2)
    net.embed = nn.Linear(FEATURES + 2, DIM).double()
    train(side, net, adamw(net), forward=lambda x: net(pad(x, (0, 2), value=1.0)))


@habit(FORWARD, "an adapter on a layer (LoRA) between two steps")
def new_adapter(side):
    net = side.apply(side.net())
    train(side, net, adamw(net))
    torch.manual_seed(2)
    net.head.adapter = nn.Linear(DIM, CLASSES).double()
    net.head.register_forward_hook(lambda layer, args, output: output + layer.adapter(*args))
    train(side, net, adamw(net))


@habit(FORWARD, "a new head in a new model, `plan.apply`, and `load_state_dict(par.state_dict(full=True, ...), ...)`")
def rebuilt(side):
    net = side.apply(side.net())
    train(side, net, adamw(net))
    state = net.state_dict() if side.alone else side.par.state_dict(full=True, everywhere=True)
    net = side.net()
    torch.manual_seed(2)
    net.head = nn.Linear(DIM, CLASSES).double()
    net, kept = side.apply(net), {name: value for name, value in state.items() if not name.startswith("head.")}
    (net if side.alone else side.par).load_state_dict(kept, strict=False)
    train(side, net, adamw(net))


@habit(FORWARD, "`register_forward_hook` and `register_full_backward_hook` on a block")
def module_hooks(side):
    net = side.apply(side.net())
    net.blocks[0].register_forward_hook(lambda module, args, output: side.note_rows("output", output))
    # The loss is a mean over this part's rows.
    net.blocks[0].register_full_backward_hook(
        lambda module, before, after: side.note_rows(
            "gradient of the output", after[0] if side.alone else after[0] / side.par.data_size
        )
    )
    train(side, net, sgd(net), micro_batches=1)


@habit(FORWARD, "a forward hook on a block that changes its output")
def changing_hook(side):
    net = side.apply(side.net())
    net.blocks[0].register_forward_hook(lambda module, args, output: 2 * output)
    train(side, net, sgd(net))


@habit(FORWARD, "a method other than forward: `module.encode(x)`")
def encode(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=lambda x: net.encode(x)[:, :CLASSES])


@habit(FORWARD, 'a method of another name, after `par.register_method("features")`')
def registered_method(side):
    class Features(Net):
        def features(self, x):
            return self.encode(x)

    net = side.apply(side.net(Features))
    if not side.alone:
        side.par.register_method("features")
    train(side, net, sgd(net), forward=lambda x: net.features(x)[:, :CLASSES])


@habit(FORWARD, "a method of another name, not registered")
def unregistered_method(side):
    class Scores(Net):
        def score(self, x):
            return self.head(self.encode(x))

    net = side.apply(side.net(Scores))
    train(side, net, sgd(net), forward=lambda x: net.score(x))


@habit(FORWARD, "a block called alone: `module.blocks[0](x)`")
def block_alone(side):
    net = side.apply(side.net())
    for x, _ in side.batches(2):
        side.note_rows("features", net.blocks[0](x @ torch.ones(FEATURES, DIM, dtype=x.dtype)).detach())
    train(side, net, sgd(net))


class Viewed(Block):
    def forward(self, x):
        return super().forward(x)[:]


class Added(Net):
    """Changes in place what a block returned, which is a view of what it computed."""

    def make_block(self):
        return Viewed()

    def encode(self, x):
        x = self.embed(x)
        for block in self.blocks:
            y, x = x, block(x)
            x += y
        return x


class InPlace(Block):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class Overwritten(Net):
    """Changes the input of a block in place."""

    def make_block(self):
        return InPlace()


@habit(FORWARD, "`x += y` on what a block returned")
def changed_output(side):
    net = side.apply(side.net(Added))
    train(side, net, sgd(net))


@habit(FORWARD, "`x.mul_(2)` on the input of a block, inside of it")
def changed_input(side):
    net = side.apply(side.net(Overwritten))
    train(side, net, sgd(net))


@habit(FORWARD, "a block called twice in a forward (shared layers)")
def shared_blocks(side):
    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([self.blocks[0]] * 2)

    net = side.apply(side.net(Shared))
    train(side, net, sgd(net))


@habit(FORWARD, "an LSTM in the model")
def recurrent(side):
    class Recurrent(Net):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(DIM, DIM, num_layers=2)

        def forward(self, x):
            x = self.encode(x)
            return self.head(self.lstm(torch.stack([x, -x]))[0].sum(0))

    net = side.apply(side.net(Recurrent))
    train(side, net, sgd(net))


@habit(FORWARD, "scalar parameters")
def scalars(side):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.scale * super().forward(x)

    net = side.apply(side.net(Scaled))
    train(side, net, sgd(net))


@habit(FORWARD, "`nn.DataParallel(module)` around it (no GPU: a call of the module)")
def data_parallel(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=nn.DataParallel(net))


@habit(FORWARD, "`DistributedDataParallel(module)` around it")
def distributed_data_parallel(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), forward=net if side.alone else nn.parallel.DistributedDataParallel(net))


@habit(FORWARD, "a GAN: two modules, two plans, two optimizers")
def adversaries(side):
    class Critic(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(CLASSES, DIM)

    maker = side.apply(side.net())
    critic = side.apply(side.net(Critic))
    makes, judges = adamw(maker), adamw(critic)
    for x, real in side.batches():
        fake = maker(x)
        loss = side.backward(
            critic,
            lambda real, fake: critic(real).square().mean() + (1 - critic(fake)).square().mean(),
            real,
            fake.detach(),
        )
        judges.step()
        judges.zero_grad()
        side.loss(loss)
        loss = critic(fake).square().mean()
        loss.backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        side.loss(loss)
    side.weights(maker)
    side.weights(critic)


GRADIENTS = "Gradients"


@habit(GRADIENTS, "no clipping")
def no_clipping(side):
    net = side.apply(side.net())
    train(side, net, sgd(net))


@habit(GRADIENTS, "no clipping, and a layout that forgets to sum a gradient over `tp`")
def forgotten_sum(side):
    class Scaled(Block):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, x):
            return x + self.down(torch.tanh(self.scale(self.up(self.norm(x)).unsqueeze(-1)).squeeze(-1)))

    class Careless(Net):
        def make_block(self):
            return Scaled()

    forgets = ModelLayout(blocks=LAYOUT.blocks, tensor={**LAYOUT.tensor.styles, "blocks.*.scale": "sequence"})
    net = side.apply(side.net(Careless), forgets)
    train(side, net, sgd(net))


@habit(GRADIENTS, "`par.clip_grad_norm_(max_norm)`")
def clipping(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), before_step=lambda x: side.clip(net, 0.1))


@habit(GRADIENTS, "`torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`")
def torchs_clipping(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), before_step=lambda x: side.note("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.1)))


@habit(GRADIENTS, "the norm that `torch.nn.utils.clip_grad_norm_` returns, read by `.item()`")
def torchs_norm(side):
    net = side.apply(side.net())
    clip = lambda x: side.note("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())  # noqa: E731
    train(side, net, sgd(net), before_step=clip)


@habit(GRADIENTS, "`torch.nn.utils.clip_grad_value_(module.parameters(), bound)`")
def clipping_values(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), before_step=lambda x: nn.utils.clip_grad_value_(net.parameters(), 0.01))


@habit(GRADIENTS, "`torch.amp.GradScaler`; one rank's loss overflows in the second step")
def grad_scaler(side):
    net = side.apply(side.net())
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number in range(4):
        x, y = batch(number)
        if number == 1:
            x[1] = float("inf")  # the second data rank's row, where there is one
        side.backward(net, lambda x, y: scaler.scale(mse_loss(net(x), y)), side.part(x), side.part(y))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.note("scale", scaler.get_scale())
    side.weights(net)


@habit(GRADIENTS, "`for micro in par.accumulate(micro_batches)`")
def accumulating(side):
    net = side.apply(side.net())
    for x, y in side.steps(net, sgd(net)):
        for micro, target in side.accumulate(zip(x.chunk(2), y.chunk(2))):
            (mse_loss(net(micro), target) / 2).backward()


@habit(GRADIENTS, "accumulation without `par.accumulate`: two backwards before a step")
def accumulating_by_hand(side):
    net = side.apply(side.net())
    for x, y in side.steps(net, sgd(net)):
        for micro, target in zip(x.chunk(2), y.chunk(2)):
            side.backward(net, lambda x, y: mse_loss(net(x), y) / 2, micro, target)
        side.gradients(net)


def leave(side, *, zero: bool):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():
        for number, (micro, target) in enumerate(side.accumulate(zip(x.chunk(4), y.chunk(4)))):
            mse_loss(net(micro), target).backward()
            if number == 1:
                break
        if zero:
            optimizer.zero_grad()
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit(GRADIENTS, "`break` inside `par.accumulate`, then `zero_grad()`")
def breaking(side):
    leave(side, zero=True)


@habit(GRADIENTS, "`break` inside `par.accumulate`, and no `zero_grad()`")
def breaking_without_zero(side):
    leave(side, zero=False)


class OutOfMemory(torch.autograd.Function):
    """Values as they are; no backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("in a backward")


class Tight(Block):
    full = False

    def forward(self, x):
        return super().forward(OutOfMemory.apply(x) if self.full else x)


class OfTight(Net):
    """Runs out of memory in the backward of a block where ``Tight.full``."""

    def make_block(self):
        return Tight()


@habit(GRADIENTS, "`except` an error of a backward, `zero_grad()`, and on to the next batch")
def going_on_after_an_error(side):
    net = side.apply(side.net(OfTight))
    optimizer = sgd(net)
    for number, (x, y) in enumerate(side.batches()):
        Tight.full = number == 1
        try:
            side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)
            optimizer.step()
        except (MemoryError, MeshparError):  # over stages each has its own, or is told of another's
            pass
        finally:
            Tight.full = False
        optimizer.zero_grad()
    side.weights(net)


@habit(GRADIENTS, "`zero_grad()` before backward")
def zero_before_backward(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y, between=optimizer.zero_grad)
        optimizer.step()
    side.weights(net)


@habit(GRADIENTS, "`zero_grad(set_to_none=False)`")
def zero_to_zeros(side):
    net = side.apply(side.net())
    optimizer = sgd(net, momentum=0.9)
    for x, y in side.batches():
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        side.gradients(net)
    side.weights(net)


@habit(GRADIENTS, "`module.zero_grad()` between forward and backward")
def zero_between(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y, between=net.zero_grad)
        optimizer.step()
    side.weights(net)


@habit(GRADIENTS, "`parameter.register_hook` that scales the gradient")
def tensor_hooks(side):
    net = side.apply(side.net())
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: 0.5 * grad)
    train(side, net, sgd(net))


@habit(GRADIENTS, "`parameter.register_hook`, two forwards before a backward")
def tensor_hooks_twice(side):
    net = side.apply(side.net())
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad / (1 + grad.abs().max()))
    train(side, net, sgd(net), forward=two_forwards(net))


@habit(GRADIENTS, "`parameter.register_hook`, two backwards before a step")
def tensor_hooks_accumulating(side):
    net = side.apply(side.net())
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: 0.5 * grad)
    accumulate_twice(side, net, sgd(net))


def accumulate_twice(side, net, optimizer):
    for x, y in side.batches(2):
        parts = list(zip(x.chunk(2), y.chunk(2)))
        for micro, target in parts if side.title == "PP" else side.accumulate(parts):
            side.backward(net, lambda x, y: mse_loss(net(x), y) / 2, micro, target, micro_batches=1)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit(GRADIENTS, "`register_post_accumulate_grad_hook` that runs an optimizer for each parameter")
def step_in_backward(side):
    net = side.apply(side.net())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in side.batches():
        loss = side.backward(net, lambda x, y: mse_loss(net(x), y), x, y, micro_batches=1)
        side.loss(loss)
    side.weights(net)


@habit(GRADIENTS, "`register_post_accumulate_grad_hook`, two backwards before a step")
def post_hooks_accumulating(side):
    net = side.apply(side.net())
    calls = {name: [] for name, _ in net.named_parameters()}
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, norms=calls[name]: norms.append(whole(parameter.grad).norm())
        )
    accumulate_twice(side, net, sgd(net))
    for name, norms in calls.items():
        side.note(f"calls of {name}", len(norms))
        side.note(f"norms of {name}", sum(norms))


@habit(GRADIENTS, "L2 penalty over `module.parameters()` in the loss")
def penalty(side):
    net = side.apply(side.net())
    optimizer = sgd(net)

    def penalised(x, y):
        return mse_loss(net(x), y) + 0.01 * sum(parameter.square().sum() for parameter in net.parameters())

    for x, y in side.steps(net, optimizer):
        side.backward(net, penalised, x, y)
        side.gradients(net)


@habit(GRADIENTS, "L2 penalty as a whole tensor: `loss + penalty.full_tensor()`")
def whole_penalty(side):
    net = side.apply(side.net())
    optimizer = sgd(net)

    def penalised(x, y):
        value = 0.01 * sum(parameter.square().sum() for parameter in net.parameters())
        return mse_loss(net(x), y) + full(value)

    for x, y in side.steps(net, optimizer):
        side.backward(net, penalised, x, y)
        side.gradients(net)


@habit(GRADIENTS, "norms for a log: `p.grad.norm().item()`, `p.norm().item()`")
def norms(side):
    net = side.apply(side.net())

    def log(x):
        side.note("gradient norm", sum(parameter.grad.norm().item() ** 2 for parameter in net.parameters()))
        side.note("weight norm", sum(parameter.norm().item() ** 2 for parameter in net.parameters()))

    train(side, net, sgd(net), before_step=log)


@habit(GRADIENTS, "norms of whole tensors: `p.grad.full_tensor().norm().item()`")
def whole_norms(side):
    net = side.apply(side.net())

    def log(x):
        grads = [full(parameter.grad) for parameter in net.parameters()]
        side.note("gradient norm", sum(grad.norm().item() ** 2 for grad in grads))

    train(side, net, sgd(net), before_step=log)


OPTIMIZERS = "Optimizers"


@habit(OPTIMIZERS, "optimizer built before `apply`")
def optimizer_first(side):
    net = side.net()
    optimizer = adamw(net)
    train(side, side.apply(net), optimizer)


@habit(OPTIMIZERS, "SGD with momentum")
def momentum(side):
    net = side.apply(side.net())
    train(side, net, sgd(net, momentum=0.9, nesterov=True))


@habit(OPTIMIZERS, "`AdamW(foreach=True)`")
def adamw_foreach(side):
    net = side.apply(side.net())
    train(side, net, adamw(net, foreach=True))


@habit(OPTIMIZERS, "`AdamW(fused=True)`")
def adamw_fused(side):
    net = side.apply(side.net())
    train(side, net, adamw(net, fused=True))


@habit(OPTIMIZERS, "`torch.optim.Adafactor`")
def adafactor(side):
    net = side.apply(side.net())
    train(side, net, torch.optim.Adafactor(net.parameters(), lr=0.01))


@habit(OPTIMIZERS, "`torch.optim.LBFGS` with a closure")
def lbfgs(side):
    net = side.apply(side.net())
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for x, y in side.batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            return side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)

        optimizer.step(closure)
    side.weights(net)


@habit(OPTIMIZERS, "SGD with a closure")
def closure(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            return side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)

        side.loss(optimizer.step(evaluate))
    side.weights(net)


@habit(OPTIMIZERS, "parameter groups")
def parameter_groups(side):
    net = side.apply(side.net())
    groups = [
        {"params": [parameter for parameter in net.parameters() if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in net.parameters() if parameter.ndim == 1], "lr": 0.02},
    ]
    train(side, net, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0, eps=1e-3))


@habit(OPTIMIZERS, "a learning rate scheduler")
def scheduler(side):
    net = side.apply(side.net())
    optimizer = adamw(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    train(side, net, optimizer, after_step=lambda x: schedule.step())


@habit(OPTIMIZERS, "`optimizer.state_dict()` loaded into a new optimizer of the same mesh")
def optimizer_state(side):
    net = side.apply(side.net())
    optimizer = adamw(net)
    train(side, net, optimizer)
    again = adamw(net)
    again.load_state_dict(optimizer.state_dict())
    train(side, net, again)


@habit(OPTIMIZERS, "freezing and unfreezing between steps")
def freezing(side):
    net = side.apply(side.net())
    optimizer, number = sgd(net), 0

    def switch(x):
        nonlocal number
        number += 1
        net.blocks[0].requires_grad_(number == 2)

    train(side, net, optimizer, after_step=switch, steps=4)


@habit(OPTIMIZERS, "frozen before `apply`, unfrozen after a step; `add_param_group`")
def unfreezing(side):
    net = side.net()
    net.blocks[0].requires_grad_(False)
    net = side.apply(net)
    optimizer = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)
    number = 0

    def switch(x):
        nonlocal number
        number += 1
        if number == 1:
            net.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net.blocks[0].parameters())})

    train(side, net, optimizer, after_step=switch)


@habit(OPTIMIZERS, "an update by hand: `p.data -= lr * p.grad`")
def update_by_hand(side):
    net = side.apply(side.net())
    for x, y in side.batches():
        side.loss(side.backward(net, lambda x, y: mse_loss(net(x), y), x, y))
        for parameter in net.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    side.weights(net)


@habit(OPTIMIZERS, "weights perturbed and restored between two backwards (SAM)")
def sharpness(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.steps(net, optimizer):
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in net.parameters()]
            for parameter, move in zip(net.parameters(), moves):
                parameter.add_(move)
        optimizer.zero_grad()
        side.loss(side.backward(net, lambda x, y: mse_loss(net(x), y), x, y))
        with torch.no_grad():
            for parameter, move in zip(net.parameters(), moves):
                parameter.sub_(move)


@habit(OPTIMIZERS, "`p.clamp_` under `no_grad` after each step")
def clamping(side):
    net = side.apply(side.net())

    @torch.no_grad()
    def clamp(x):
        for parameter in net.parameters():
            parameter.clamp_(-0.2, 0.2)

    train(side, net, sgd(net), after_step=clamp)


@habit(OPTIMIZERS, "an average by hand over `named_parameters()` (EMA)")
def average_by_hand(side):
    net = side.apply(side.net())
    average = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}

    @torch.no_grad()
    def follow(x):
        for name, parameter in net.named_parameters():
            average[name].mul_(0.9).add_(parameter, alpha=0.1)

    train(side, net, sgd(net), after_step=follow)
    for name, value in average.items():
        side.note(f"average of {name}", value)


@habit(OPTIMIZERS, "`torch.optim.swa_utils.AveragedModel(module)`")
def averaged_model(side):
    net = side.apply(side.net())
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    train(side, net, sgd(net), after_step=lambda x: average.update_parameters(net))
    for x, _ in side.batches(1):
        side.note_rows("output of the average", average(x))


@habit(OPTIMIZERS, "`par.averaged(decay)`")
def averaged(side):
    net = side.apply(side.net())
    if side.alone:
        average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        train(side, net, sgd(net), after_step=lambda x: average.update_parameters(net))
        side.note_rows("output of the average", average(batch(0)[0]))
        return
    average = side.par.averaged(0.9)
    train(side, net, sgd(net), after_step=lambda x: average.update())
    with average.swapped(), torch.no_grad():
        side.note_rows("output of the average", side.output(net, side.part(batch(0)[0])))


WEIGHTS = "Weights in and out"


@habit(WEIGHTS, "`copy.deepcopy(module)`")
def copying(side):
    net = side.apply(side.net())
    other = copy.deepcopy(net)
    train(side, net, sgd(net))
    for x, _ in side.batches(1):
        side.note_rows("output of the copy", other(x))


@habit(WEIGHTS, "`torch.save(module.state_dict(), file)`, read by one process")
def saving(side):
    net = side.apply(side.net())
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    plain = side.net()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    for x, _ in side.batches(1):
        side.note_rows("output", plain(x))


@habit(WEIGHTS, "`torch.save(optimizer.state_dict(), file)`, read by one process")
def saving_the_optimizer(side):
    net = side.apply(side.net())
    optimizer = adamw(net)
    train(side, net, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for number, state in torch.load(file)["state"].items():
        average = state["exp_avg"]
        side.note(f"exp_avg of {number} is a DTensor", float(type(average) is not torch.Tensor))
        side.note(f"exp_avg of {number}", local_tensor(average))  # what the file has


@habit(WEIGHTS, "`par.state_dict(full=True, everywhere=True)`")
def full_state(side):
    net = side.apply(side.net())
    train(side, net, sgd(net))
    for name, value in (net.state_dict() if side.alone else side.par.state_dict(full=True, everywhere=True)).items():
        assert type(value) is torch.Tensor
        side.note(name, value)


@habit(WEIGHTS, "`module.load_state_dict(d)`, d a whole state of one process")
def loading(side):
    net = side.apply(side.net())
    train(side, net, sgd(net))
    net.load_state_dict({name: 2 * value for name, value in side.net().state_dict().items()})
    train(side, net, sgd(net))


@habit(WEIGHTS, "`par.load_state_dict(d)`, d a whole state of one process")
def loading_by_par(side):
    net = side.apply(side.net())
    state = {name: 2 * value for name, value in side.net().state_dict().items()}
    if side.alone:
        net.load_state_dict(state)
    else:
        side.par.load_state_dict(state)
    train(side, net, sgd(net))


@habit(WEIGHTS, "`optimizer.load_state_dict(d)`, d the state of one process")
def loading_the_optimizer(side):
    alone = side.net()
    before = adamw(alone)
    alone(torch.ones(1, FEATURES).double()).sum().backward()
    before.step()
    for trained in (False, True):  # a new optimizer, and one that has stepped
        net = side.apply(side.net())
        optimizer = adamw(net)
        if trained:
            train(side, net, optimizer)
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        train(side, net, optimizer)


@habit(WEIGHTS, "`module.load_state_dict(module.state_dict())` on the same mesh, values kept in between")
def keeping(side):
    net = side.apply(side.net())
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    train(side, net, sgd(net))
    net.load_state_dict(kept)
    train(side, net, sgd(net))


@habit(WEIGHTS, "`module.to(device)` after `apply`")
def moving(side):
    net = side.apply(side.net()).to("cpu")
    train(side, net, sgd(net))


@habit(WEIGHTS, "`module.float()` after `apply`", tolerance=1e-5)
def casting(side):
    net = side.apply(side.net()).float()
    train(side, net, sgd(net), forward=lambda x: net(x.float()).double())


@habit(WEIGHTS, "`p.copy_(values)` from a whole tensor, under `no_grad` between steps")
def setting(side):
    net = side.apply(side.net())
    values = {name: 0.5 * value.detach() for name, value in side.net().named_parameters()}

    @torch.no_grad()
    def reset(x):
        for name, parameter in net.named_parameters():
            if name.startswith("blocks.0."):
                parameter.copy_(values[name])

    train(side, net, sgd(net), after_step=reset)


class Normalised(Net):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(DIM)

    def encode(self, x):
        return self.bn(super().encode(x))


EVALUATION = "Evaluation and modes"


def evaluate(side, mode):
    """Evaluates before the first step and between steps, and trains on."""
    net = side.apply(side.net())

    def look(x):
        net.eval()
        with mode():
            side.note_rows("output", net(x).clone())
        net.train()

    look(side.part(batch(0)[0]))
    train(side, net, adamw(net), after_step=look)


@habit(EVALUATION, "`torch.no_grad()` before the first step and between steps")
def evaluating(side):
    evaluate(side, torch.no_grad)


@habit(EVALUATION, "`torch.inference_mode()` before the first step and between steps")
def inferring(side):
    evaluate(side, torch.inference_mode)


@habit(EVALUATION, "`par.forward(micro_batches, function)` between steps")
def evaluating_by_par(side):
    net = side.apply(side.net())

    def look(x):
        halves, function = x.chunk(2), lambda module, rows: module(rows)
        outputs = [net(half).detach() for half in halves] if side.alone else side.par.forward(halves, function)
        side.note_rows("output", torch.cat(outputs))

    train(side, net, adamw(net), after_step=look)


@habit(EVALUATION, "a metric's forward with gradients, between backward and step")
def metric_before_step(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), before_step=lambda x: side.note_rows("metric", net(x)))


@habit(EVALUATION, "a metric's forward with gradients, after the step")
def metric_after_step(side):
    net = side.apply(side.net())
    train(side, net, sgd(net), after_step=lambda x: side.note_rows("metric", net(x)))


class Dropping(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def encode(self, x):
        return self.drop(super().encode(x))


@habit(EVALUATION, "`module.eval()` and `module.train()`, dropout in the model")
def modes(side):
    net = side.apply(side.net(Dropping)).eval()
    train(side, net, sgd(net))
    side.note("differs in training", float(not torch.equal(net.train()(batch(0)[0]), net.eval()(batch(0)[0]))))


@habit(EVALUATION, "`generate` of a transformers model, between steps (its norms are float32)", tolerance=1e-5)
def generating(side):
    import transformers

    sizes = dict(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    net = side.apply(
        side.net(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=32))),
        None,
    )
    optimizer = adamw(net)
    for seed in range(2):
        tokens = side.part(torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed)))
        side.loss(side.backward(net, lambda tokens: net(input_ids=tokens, labels=tokens).loss, tokens))
        optimizer.step()
        optimizer.zero_grad()
        side.note_rows("tokens", net.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0))
    side.weights(net)


@habit(EVALUATION, "batch norm in training")
def batch_norm(side):
    net = side.apply(side.net(Normalised))
    train(side, net, sgd(net), micro_batches=1)


@habit(EVALUATION, "batch norm in eval")
def batch_norm_frozen(side):
    net = side.apply(side.net(Normalised)).eval()
    train(side, net, sgd(net))


@habit(EVALUATION, "a buffer that counts forwards")
def counting(side):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.steps += 1
            return super().forward(x) / self.steps

    net = side.apply(side.net(Counting))
    train(side, net, sgd(net), micro_batches=1)


@habit(EVALUATION, "a buffer computed from the batch (a running mean by hand)")
def running_mean(side):
    class Running(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(DIM))

        def encode(self, x):
            x = super().encode(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x - self.mean

    net = side.apply(side.net(Running))
    meet = lambda x: None if side.alone else side.par.clip_grad_norm_(float("inf"))  # noqa: E731
    train(side, net, sgd(net), after_step=meet, micro_batches=1)


DATA = "Data and ranks"


def sampled(side, rank, ranks, count=3):
    """Rows by a DistributedSampler without shuffling; alone, all of them."""
    for seed in range(count):
        x, y = batch(seed)
        rows = range(len(x))
        if not side.alone:
            rows = list(torch.utils.data.DistributedSampler(range(len(x)), ranks, rank, shuffle=False))
        yield x[list(rows)], y[list(rows)]


def train_sampled(side, net, rank, ranks):
    optimizer = sgd(net)
    for x, y in sampled(side, rank, ranks):
        side.loss(side.backward(net, lambda x, y: mse_loss(net(x), y), x, y))
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit(DATA, "`DistributedSampler(data, par.data_size, par.data_rank)`")
def sampler_by_data_rank(side):
    net = side.apply(side.net())
    train_sampled(side, net, *((0, 1) if side.alone else (side.par.data_rank, side.par.data_size)))


@habit(DATA, "`DistributedSampler(data)`: another batch on each rank")
def sampler_by_rank(side):
    net = side.apply(side.net())
    train_sampled(side, net, side.rank, side.world)


@habit(DATA, "`torch.manual_seed(rank)` and dropout")
def seeds_by_rank(side):
    net = side.apply(side.net(Dropping))
    optimizer = sgd(net)
    for seed in range(3):
        x, y = batch(seed)

        def loss(x, y, seed=seed):
            losses = []
            # One process draws each part's mask from the seed of the rank that has this part.
            for part in range(side.parts) if side.alone else [side.rank]:
                torch.manual_seed(10 * seed + part)
                if side.alone and side.title == "PP":  # the last stage has the dropout, and draws numbers of its own
                    torch.manual_seed(10 * seed + side.world - 1)
                    SplitState().part(x.device, side.world - 1)
                mine = slice(part, None, side.parts) if side.alone else slice(None)
                losses.append(mse_loss(net(x[mine]), y[mine]))
            return torch.stack(losses).mean()

        side.loss(side.backward(net, loss, side.part(x), side.part(y), micro_batches=1))
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit(DATA, "a smaller last batch on every rank")
def smaller_last_batch(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for seed, rows in ((0, 8), (1, 8), (2, 4)):
        x, y = (side.part(tensor[:rows]) for tensor in batch(seed))
        side.backward(net, lambda x, y: mse_loss(net(x), y), x, y)
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit(DATA, "a branch that only some ranks take (a parameter without a gradient there)")
def branching(side):
    class Branching(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(DIM, CLASSES)

        def forward(self, x, branch=0):
            x = self.encode(x)
            return self.other(x) if branch else self.head(x)

    net = side.apply(side.net(Branching))
    optimizer = sgd(net)

    def loss(x, y):
        if not side.alone:
            return mse_loss(net(x, side.par.data_rank % 2), y)
        parts = [  # rows of odd ranks take the branch
            (mse_loss(net(x[part :: side.parts], part % 2), y[part :: side.parts])) for part in range(side.parts)
        ]
        return torch.stack(parts).mean()

    for x, y in side.steps(net, optimizer, 2):
        side.loss(side.backward(net, loss, x, y))


@habit(DATA, "`par.accumulate` over more micro-batches on one rank", refused=True, limit_s=30.0)
def uneven_micro_batches(side):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():
        count = 2 if side.rank == 0 else 1
        for micro, target in side.accumulate(list(zip(x.chunk(count), y.chunk(count)))):
            mse_loss(net(micro), target).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit(CONTROL, "weights that differ on rank 1")
def control_wrong(side):
    net = side.apply(side.net())
    train(side, net, sgd(net, lr=0.1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2.0 if side.rank == 1 else 1.0)
    side.weights(net)


@habit(CONTROL, "an error that is not meshpar's")
def control_raw(side):
    if not side.alone:
        raise ValueError("raw")


@habit(CONTROL, "a refusal on rank 0 alone")
def control_refused_on_one_rank(side):
    if not side.alone and side.rank == 0:
        raise MeshparError("refused")


@habit(CONTROL, "a rank that waits for ever", limit_s=1.5)
def control_hang(side):
    if not side.alone and side.rank == 0:
        side.apply(side.net())


@habit(CONTROL, "nothing wrong, after all of these")
def control_exact(side):
    no_clipping(side)
