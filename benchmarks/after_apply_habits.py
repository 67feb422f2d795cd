"""What a user's loop does with a module after ``plan.apply``, each habit a few lines at named points of a model and a
loop.

The same lines run in one process and on the ranks of a plan. In them ``@k`` is a step, ``@p`` a parameter's name and
``@m`` that of a linear layer; ``full(t)`` is ``t.full_tensor()`` of a DTensor, and ``mean(t)`` the mean over data ranks
of what each has of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

ONCE, FROM, ALWAYS = "step == @k", "step >= @k", "True"
"""When lines at a point inside of the loop run: in one step, from a step on, in every step."""


@final
@dataclass(frozen=True, slots=True)
class Habit:
    """Something that people do with a module.

    Attributes:
        group: its kind; kinds are drawn alike, then the habits in one.
        at: point -> lines there, in the class of blocks (``block_init``, ``inner`` between the split layers,
            ``block``), in that of the model (``init``, ``enter``, ``forward``, ``out``), and in the loop: ``built``
            (before apply), ``applied``, ``start`` (with an optimizer), ``step``, ``loss`` (before the backward),
            ``between`` (backward and step), ``stepped``, ``end``. ``call``, ``backward`` and ``update`` replace the
            forward, the backward and the optimizer's step.
        when: the conditions under which lines inside of the loop may run; one is drawn.
    """

    group: str
    at: Mapping[str, tuple[str, ...]]
    when: tuple[str, ...] = (ONCE, FROM, ALWAYS)

    def replaces(self) -> set[str]:
        """Return the lines of the plain loop in whose place this habit's stand."""
        return {"call", "backward", "update"} & set(self.at)


def _written(*lines: str, at: str = "stepped") -> Habit:
    """A write into a parameter, under ``no_grad``."""
    return Habit(
        "writes", {at: ('p = module.get_parameter("@p")', "with torch.no_grad():", *(f"    {line}" for line in lines))}
    )


def _changed(group: str, *lines: str, optimizer: bool = True) -> Habit:
    """A change of the module before one step, with a new optimizer where parameters may be other ones."""
    return Habit(group, {"step": (*lines, *((OPTIMIZER,) if optimizer else ()))}, (ONCE,))


def _read(*lines: str) -> Habit:
    return Habit("reads", {"loss": ('p = module.get_parameter("@p")', *lines)})


def _odd(*init: str, forward: tuple[str, ...] = (), **at: tuple[str, ...]) -> Habit:
    return Habit("odd", {"init": init, **({"forward": forward} if forward else {}), **at})


def _kept(*block: str, loss: tuple[str, ...] = (), **at: tuple[str, ...]) -> Habit:
    return Habit("keeps", {"block": block, **({"loss": loss} if loss else {}), **at}, (ALWAYS, FROM))


def _evaluated(*lines: str, mode: str = "no_grad", at: str = "stepped") -> Habit:
    return Habit("evaluates", {at: (f"with torch.{mode}():", *(f"    {line}" for line in lines or (EVALUATE,)))})


def _hooked(*lines: str, **at: tuple[str, ...]) -> Habit:
    return Habit("hooks", {"start": lines, **at}, (ALWAYS, FROM, ONCE))


def _looped(group: str, when: tuple[str, ...] = (ONCE, FROM, ALWAYS), **at: str | tuple[str, ...]) -> Habit:
    return Habit(group, {point: (lines,) if isinstance(lines, str) else lines for point, lines in at.items()}, when)


OPTIMIZER = "optimizer = make(module)"
EVALUATE = 'record[f"eval {step}"] = full(module(EVAL)).detach().clone()'
OWNER = ('owner, _, leaf = "@p".rpartition(".")', 'owner, p = module.get_submodule(owner), module.get_parameter("@p")')
LAYER = 'layer = module.get_submodule("@m")'
HEAD = ("module.head = nn.Linear(8, 3)",)
MINE = "par.data_rank == par.data_size - 1"
"""On one data rank alone; true in one process."""

HABITS: dict[str, Habit] = {
    # Adds
    "new_head": _changed("adds", "torch.manual_seed(5)", "module.head = nn.Linear(8, 3)"),
    "new_buffer": _changed("adds", 'module.register_buffer("late", torch.ones(8))', optimizer=False),
    "new_parameter": _changed("adds", 'module.register_parameter("late", nn.Parameter(torch.ones(8)))'),
    "new_parameter_of_a_layer": _changed("adds", LAYER, "layer.late = nn.Parameter(torch.ones(3))"),
    "new_module_without_parameters": _changed("adds", LAYER, "layer.drop = nn.Dropout(0.0)", optimizer=False),
    "new_block": _changed("adds", "torch.manual_seed(5)", "module.blocks.append(Block())"),
    "new_adapter": _changed(
        "adds",
        "torch.manual_seed(5)",
        LAYER,
        "layer.adapter = nn.Linear(layer.in_features, layer.out_features)",
        "layer.register_forward_hook(lambda layer, args, out: out + layer.adapter(args[0]))",
    ),
    "weight_norm": _changed("adds", LAYER, "nn.utils.parametrizations.weight_norm(layer)"),
    "spectral_norm": _changed("adds", LAYER, "torch.manual_seed(5)", "nn.utils.spectral_norm(layer)"),
    "pruned": _changed(
        "adds", LAYER, 'importlib.import_module("torch.nn.utils.prune").l1_unstructured(layer, "weight", 0.3)'
    ),
    "probe_outside": Habit(
        "adds",
        {
            "start": ("torch.manual_seed(5)", "probe = nn.Linear(3, 1)"),
            "loss": ("loss = loss + 0.1 * probe(out).pow(2).mean()",),
        },
    ),
    # Replaces
    "new_forward_of_a_block": _changed(
        "replaces", "inner = module.blocks[0].forward", "module.blocks[0].forward = lambda x: 0.5 * inner(x)"
    ),
    "new_forward_of_a_layer": _changed(
        "replaces", LAYER, "layer.forward = lambda x, layer=layer: 0.5 * F.linear(x, layer.weight, layer.bias)"
    ),
    "new_forward_around_a_layer": _changed(
        "replaces", LAYER, "inner = layer.forward", "layer.forward = lambda x: 0.5 * inner(x)"
    ),
    "new_forward_of_the_module": _changed(
        "replaces", "before = module.forward", "module.forward = lambda x: 0.5 * before(x)"
    ),
    "new_values": _changed("replaces", *OWNER, "setattr(owner, leaf, nn.Parameter(0.5 * full(p.detach())))"),
    "new_parameter_from_it": _changed("replaces", *OWNER, "setattr(owner, leaf, nn.Parameter(0.5 * p.detach()))"),
    "wrapped_layer": _changed("replaces", "module.head = nn.Sequential(module.head, nn.Dropout(0.0))"),
    "wrapped_block": _changed("replaces", "module.blocks[1] = nn.Sequential(module.blocks[1])"),
    "equal_layer": _changed("replaces", "other = build()", "module.head = other.head"),
    "identity_block": _changed("replaces", "module.blocks[1] = nn.Identity()"),
    "swapped_blocks": _changed("replaces", "module.blocks[0], module.blocks[1] = module.blocks[1], module.blocks[0]"),
    "another_class": _changed(
        "replaces",
        "class Halved(Block):",
        "    def forward(self, x):",
        "        return 0.5 * super().forward(x)",
        "module.blocks[0].__class__ = Halved",
        optimizer=False,
    ),
    # Removes
    "no_bias": _changed("removes", LAYER, "layer.bias = None"),
    "deleted_bias": _changed("removes", LAYER, "del layer.bias", 'layer.register_parameter("bias", None)'),
    "no_block": _changed("removes", "del module.blocks[1]"),
    "skipped_block": _changed("removes", "module.blocks = nn.ModuleList([module.blocks[0]])"),
    "block_not_called": Habit("removes", {"start": ("module.blocks[1].forward = lambda x: x",)}),
    # Writes
    "scaled": _written("p.mul_(0.9)"),
    "scaled_data": _written("p.data.mul_(0.9)"),
    "new_data": _written("p.data = 0.9 * p.data"),
    "new_data_of_one_process": _written("p.data = 0.9 * full(p.data)"),
    "subtracted_data": _written("p.data -= 0.01 * p.data"),
    "copied": _written("p.copy_(0.9 * p)"),
    "copied_from_whole": _written("p.copy_(0.9 * full(p))"),
    "set_from_whole": _written("p.data.copy_(torch.ones(p.shape))"),
    "zeros": _written("nn.init.zeros_(p)"),
    "constant": _written("nn.init.constant_(p, 0.1)"),
    "normal": _written("torch.manual_seed(3)", "nn.init.normal_(p, std=0.1)"),
    "uniform": _written("torch.manual_seed(3)", "nn.init.uniform_(p, -0.1, 0.1)"),
    "xavier": _written("torch.manual_seed(3)", "nn.init.xavier_uniform_(p) if p.ndim > 1 else nn.init.ones_(p)"),
    "orthogonal": _written("torch.manual_seed(3)", "nn.init.orthogonal_(p) if p.ndim > 1 else nn.init.ones_(p)"),
    "truncated": _written("torch.manual_seed(3)", "nn.init.trunc_normal_(p, std=0.1)"),
    "noise": _written("torch.manual_seed(3)", "p.add_(0.01 * torch.randn_like(p))"),
    "noise_of_a_shape": _written("torch.manual_seed(3)", "p.add_(0.01 * torch.randn(p.shape))"),
    "dropped": _written("torch.manual_seed(3)", "p.copy_(F.dropout(p, 0.3))"),
    "bernoulli": _written("torch.manual_seed(3)", "p.mul_(torch.bernoulli(torch.full_like(p, 0.7)))"),
    "layer_reset": _looped("writes", stepped=("torch.manual_seed(3)", LAYER, "layer.reset_parameters()")),
    "all_reset": _looped(
        "writes",
        stepped=(
            "torch.manual_seed(3)",
            "module.apply(lambda each: each.reset_parameters() if isinstance(each, nn.Linear) else None)",
        ),
    ),
    "normed_rows": _written("p.div_(p.norm(dim=-1, keepdim=True) + 0.1)"),
    "normalised": _written("p.copy_(F.normalize(p, dim=0))"),
    "centred": _written("p.sub_(p.mean())"),
    "clamped": _written("p.clamp_(-0.1, 0.1)"),
    "limited_norm": _written("p.mul_((1.0 / p.norm()).clamp(max=1.0))"),
    "renormed": _written("p.copy_(torch.renorm(p, 2, 0, 0.5) if p.ndim > 1 else p)"),
    "masked": _written("p[p < 0] = 0"),
    "masked_fill": _written("p.masked_fill_(p < 0, 0.0)"),
    "first_row": _written("p[0] = 0.1"),
    "last_row": _written("p[-1].zero_()"),
    "first_row_of_data": _written("p.data[0].mul_(0.5)"),
    "index_fill": _written("p.index_fill_(0, torch.tensor([0, 2]), 0.1)"),
    "flat_element": _written("p.view(-1)[0] = 0.3"),
    "numpy": _written("p.detach().numpy()[:] *= 0.9"),
    "local_part": _written("(p.to_local() if hasattr(p, 'to_local') else p).mul_(0.9)"),
    "foreach": _looped(
        "writes", stepped=("with torch.no_grad():", "    torch._foreach_mul_(list(module.parameters()), 0.9)")
    ),
    "sorted_rows": _written("p.copy_(p.sort(dim=0).values)"),
    "rolled": _written("p.copy_(p.roll(1, 0))"),
    "flipped": _written("p.copy_(p.flip(0))"),
    "vectors": _looped(
        "writes",
        stepped=(
            "vector = nn.utils.parameters_to_vector(module.parameters())",
            "with torch.no_grad():",
            "    nn.utils.vector_to_parameters(0.9 * vector.detach(), module.parameters())",
        ),
    ),
    "without_no_grad": _looped("writes", stepped=('module.get_parameter("@p").mul_(0.9)',)),
    "average": _looped(
        "writes",
        (ALWAYS,),
        start="average = {n: p.detach().clone() for n, p in module.named_parameters()}",
        stepped=(
            "with torch.no_grad():",
            "    for n, p in module.named_parameters():",
            "        average[n].lerp_(p, 0.3)",
        ),
        end=('record |= {f"average {n}": whole(value) for n, value in average.items()}',),
    ),
    "average_swapped": _looped(
        "writes",
        start="average = {n: 0.5 * p.detach().clone() for n, p in module.named_parameters()}",
        stepped=(
            "with torch.no_grad():",
            "    kept = {n: p.detach().clone() for n, p in module.named_parameters()}",
            "    for n, p in module.named_parameters():",
            "        p.copy_(average[n])",
            f"    {EVALUATE}",
            "    for n, p in module.named_parameters():",
            "        p.copy_(kept[n])",
        ),
    ),
    "average_swapped_by_data": _looped(
        "writes",
        start="average = {n: 0.5 * p.detach().clone() for n, p in module.named_parameters()}",
        stepped=(
            "for n, p in module.named_parameters():",
            "    p.data, average[n] = average[n], p.data",
            "with torch.no_grad():",
            f"    {EVALUATE}",
            "for n, p in module.named_parameters():",
            "    p.data, average[n] = average[n], p.data",
        ),
    ),
    "average_swapped_before_backward": _looped(
        "writes",
        loss=(
            "with torch.no_grad():",
            "    kept = {n: p.detach().clone() for n, p in module.named_parameters()}",
            "    for n, p in module.named_parameters():",
            "        p.data.mul_(0.5)",
            f"    {EVALUATE}",
            "    for n, p in module.named_parameters():",
            "        p.data.copy_(kept[n])",
        ),
    ),
    "between_forward_and_backward": _written("p.mul_(0.9)", at="loss"),
    "data_between_forward_and_backward": _written("p.data.mul_(0.9)", at="loss"),
    "between_backward_and_step": _written("p.mul_(0.9)", at="between"),
    "before_forward": _written("p.mul_(0.9)", at="step"),
    "in_forward": Habit("writes", {"forward": ("with torch.no_grad():", "    self.head.weight.mul_(0.9)")}),
    "in_forward_by_data": Habit("writes", {"forward": ("self.head.weight.data.mul_(0.9)",)}),
    "in_forward_of_a_block": Habit(
        "writes", {"inner": ("with torch.no_grad():", "    self.down.weight.clamp_(-0.2, 0.2)")}
    ),
    "in_forward_after_use": Habit("writes", {"out": ("with torch.no_grad():", "    self.table.weight.mul_(0.9)")}),
    "in_forward_when_evaluated": Habit(
        "writes",
        {
            "enter": ("if not torch.is_grad_enabled():", "    self.head.weight.mul_(0.9)"),
            "stepped": ("with torch.no_grad():", "    module(x)"),
        },
    ),
    "in_a_hook": _looped(
        "writes",
        start=(
            "@torch.no_grad()",
            "def halve(head, args):",
            "    head.weight.mul_(0.9)",
            "module.head.register_forward_pre_hook(halve)",
        ),
    ),
    "in_a_hook_of_the_module": _looped(
        "writes",
        start=(
            "@torch.no_grad()",
            "def halve(net, args):",
            "    net.head.weight.mul_(0.9)",
            "module.register_forward_pre_hook(halve)",
        ),
    ),
    "in_a_gradient_hook": _looped(
        "writes",
        loss=("@torch.no_grad()", "def halve(grad):", "    module.head.weight.mul_(0.9)", "out.register_hook(halve)"),
    ),
    # Trains some
    "frozen_later": _looped("freezes", (ALWAYS,), step='module.get_parameter("@p").requires_grad_(step < @k)'),
    "frozen_once": _looped("freezes", (ALWAYS,), step='module.get_parameter("@p").requires_grad_(step != @k)'),
    "thawed": _looped(
        "freezes",
        (ALWAYS,),
        built='model.get_parameter("@p").requires_grad_(False)',
        step='module.get_parameter("@p").requires_grad_(step >= @k)',
    ),
    "frozen_layer": _looped("freezes", (ALWAYS,), step='module.get_submodule("@m").requires_grad_(step % 2 == 0)'),
    "frozen_block": _looped("freezes", (ALWAYS,), step="module.blocks[0].requires_grad_(step < @k)"),
    "only_the_head": _looped(
        "freezes", (ALWAYS,), step=("module.requires_grad_(step < @k)", "module.head.requires_grad_(True)")
    ),
    "frozen_between": _looped(
        "freezes",
        loss='module.get_parameter("@p").requires_grad_(False)',
        stepped='module.get_parameter("@p").requires_grad_(True)',
    ),
    "frozen_after_backward": _looped(
        "freezes",
        between='module.get_parameter("@p").requires_grad_(False)',
        stepped='module.get_parameter("@p").requires_grad_(True)',
    ),
    "frozen_all": _looped(
        "freezes",
        step=(
            "module.requires_grad_(False)",
            'record[f"frozen {step}"] = full(module(EVAL)).detach().clone()',
            "module.requires_grad_(True)",
        ),
    ),
    "frozen_on_one_rank": _looped("freezes", step=f'module.get_parameter("@p").requires_grad_(not ({MINE}))'),
    "no_gradient": _looped("freezes", between='module.get_parameter("@p").grad = None'),
    "optimizer_of_some": _looped(
        "freezes", (ONCE,), step="optimizer = torch.optim.SGD([p for p in module.parameters() if p.ndim > 1], lr=0.1)"
    ),
    # Ties
    "tied_layers": _changed("ties", "module.blocks[1].up.weight = module.blocks[0].up.weight"),
    "tied_blocks": _changed("ties", "module.blocks[1] = module.blocks[0]"),
    "tied_norms": _changed("ties", "module.blocks[1].norm = module.blocks[0].norm"),
    "tied_to_a_new_name": _changed("ties", "module.again = module.head"),
    "tied_values": _written("module.blocks[1].up.weight.copy_(module.blocks[0].up.weight)"),
    "untied": _looped(
        "ties",
        (ONCE,),
        built="model.blocks[1].down.weight = model.blocks[0].down.weight",
        step=("module.blocks[1].down.weight = nn.Parameter(module.blocks[0].down.weight.detach().clone())", OPTIMIZER),
    ),
    "tied_before": _looped("ties", built="model.blocks[1].norm = model.blocks[0].norm"),
    # Reads weights in a loss
    "penalty": _read("loss = loss + 0.1 * full(p).pow(2).sum()"),
    "penalty_of_shards": _read("loss = loss + 0.1 * p.pow(2).sum()"),
    "penalty_made_whole": _read("loss = loss + 0.1 * full(p.pow(2).sum())"),
    "absolute": _read("loss = loss + 0.1 * full(p.abs().sum())"),
    "norm": _read("loss = loss + 0.1 * full(p.norm())"),
    "norm_of_the_whole": _read("loss = loss + 0.1 * full(p).norm()"),
    "largest": _read("loss = loss + 0.1 * full(p.max())"),
    "mean": _read("loss = loss + 0.1 * full(p.mean()).pow(2)"),
    "part_of_it": _read("loss = loss + 0.1 * full(p[0]).pow(2).sum()"),
    "local": Habit(
        "reads",
        {
            "between": (
                'p = module.get_parameter("@p")',
                "(0.1 * (p.to_local() if hasattr(p, 'to_local') else p).pow(2).sum()).backward()",
            )
        },
    ),
    "all_weights": _read("loss = loss + 0.1 * sum(full(p).pow(2).sum() for p in module.parameters())"),
    "all_weights_made_whole": _read(
        "loss = loss + 0.1 * full(sum(p.pow(2).sum() for p in module.parameters() if p.ndim > 1))"
    ),
    "from_the_start": Habit(
        "reads",
        {
            "start": ('start = full(module.get_parameter("@p").detach()).clone()',),
            "loss": ('loss = loss + 0.1 * (full(module.get_parameter("@p")) - start).pow(2).sum()',),
        },
    ),
    "from_the_start_in_shards": Habit(
        "reads",
        {
            "start": ('begin = module.get_parameter("@p").detach().clone()',),
            "loss": ('loss = loss + 0.1 * full((module.get_parameter("@p") - begin).pow(2).sum())',),
        },
    ),
    "orthogonal_penalty": _read(
        "w = full(p).reshape(len(p), -1)", "loss = loss + 0.1 * (w @ w.T - torch.eye(len(p))).pow(2).mean()"
    ),
    "orthogonal_in_shards": _read("w = p.reshape(len(p), -1)", "loss = loss + 0.1 * full((w @ w.T).pow(2).mean())"),
    "used_with_the_output": _read("loss = loss + 0.1 * out.mean() * full(p).mean()"),
    "used_as_a_layer": _read("loss = loss + 0.1 * F.linear(out, full(module.head.weight).T).pow(2).mean()"),
    "before_the_forward": Habit(
        "reads",
        {"step": ('early = 0.1 * full(module.get_parameter("@p")).pow(2).sum()',), "loss": ("loss = loss + early",)},
        (ALWAYS,),
    ),
    "in_its_own_backward": _read("(0.1 * full(p).pow(2).sum()).backward()"),
    "in_its_own_backward_after": Habit(
        "reads", {"between": ('(0.1 * full(module.get_parameter("@p")).pow(2).sum()).backward()',)}
    ),
    "gradient_of_gradient": _read(
        "(g,) = torch.autograd.grad(full(p).pow(3).sum(), p, create_graph=True)",
        "loss = loss + 0.1 * full(g).pow(2).sum()",
    ),
    "logged": _looped("reads", stepped='record[f"norm {step}"] = full(module.get_parameter("@p").detach().norm())'),
    "logged_number": _looped(
        "reads", stepped='record[f"norm {step}"] = torch.tensor(module.get_parameter("@p").norm().item())'
    ),
    "logged_gradient": _looped(
        "reads",
        between=(
            'g = module.get_parameter("@p").grad',
            'record[f"norm {step}"] = full(g.norm()) if g is not None else torch.zeros(())',
        ),
    ),
    "logged_all": _looped(
        "reads",
        between='record[f"norm {step}"] = torch.stack([full(p.grad.norm()) for p in module.parameters() if p.grad is not None]).norm()',
    ),
    "compared": _looped(
        "reads",
        stepped='record[f"finite {step}"] = torch.tensor(float(all(torch.isfinite(full(p)).all() for p in module.parameters())))',
    ),
    # Keeps attributes
    "output": _kept("self.last = y", loss=("loss = loss + 0.1 * module.blocks[0].last.pow(2).mean()",)),
    "output_alone": _kept("self.last = y", loss=("loss = module.blocks[0].last.pow(2).mean()",)),
    "all_outputs": _kept(
        "self.last = y.pow(2).mean()", loss=("loss = loss + 0.1 * sum(block.last for block in module.blocks)",)
    ),
    "appended": Habit(
        "keeps",
        {
            "block_init": ("self.seen = []",),
            "block": ("self.seen.append(y.pow(2).mean())",),
            "loss": ("loss = loss + 0.1 * module.blocks[0].seen[-1]",),
            "stepped": ("for block in module.blocks:", "    block.seen.clear()"),
        },
        (ALWAYS,),
    ),
    "appended_forever": Habit(
        "keeps",
        {
            "block_init": ("self.seen = []",),
            "block": ("self.seen.append(y.detach().pow(2).mean())",),
            "end": ('record["seen"] = mean(torch.stack(module.blocks[0].seen).sum())',),
        },
    ),
    "appended_outside": Habit(
        "keeps",
        {
            "block": ("SEEN.append(y.pow(2).mean())",),
            "step": ("SEEN.clear()",),
            "loss": ("loss = loss + 0.1 * sum(SEEN)",),
        },
        (ALWAYS,),
    ),
    "counted": Habit("keeps", {"block_init": ("self.calls = 0",), "block": ("self.calls += 1", "y = y / self.calls")}),
    "counted_buffer": Habit(
        "keeps",
        {
            "block_init": ('self.register_buffer("calls", torch.zeros(()))',),
            "block": ("self.calls += 1", "y = y / self.calls"),
        },
    ),
    "counted_steps": Habit(
        "keeps", {"init": ("self.calls = 0",), "out": ("self.calls += 1", "out = out / self.calls")}
    ),
    "cached_mask": Habit(
        "keeps",
        {
            "block_init": ("self.masks = {}",),
            "block": (
                "if y.shape not in self.masks:",
                "    self.masks[y.shape] = torch.linspace(0, 1, y.shape[-1])",
                "y = y * self.masks[y.shape]",
            ),
        },
    ),
    "cached_rows": Habit(
        "keeps",
        {
            "block": (
                "if hasattr(self, 'last') and self.last.shape == y.shape:",
                "    y = y + 0.1 * self.last",
                "self.last = y.detach()",
            )
        },
    ),
    "cached_graph": Habit(
        "keeps",
        {
            "block": (
                "if getattr(self, 'last', None) is not None and self.last.shape == y.shape:",
                "    y = y + 0.1 * self.last",
                "self.last = y",
            )
        },
    ),
    "inner": Habit(
        "keeps", {"inner": ("self.hidden = h",), "loss": ("loss = loss + 0.1 * module.blocks[0].hidden.pow(2).mean()",)}
    ),
    "inner_probe": Habit(
        "keeps",
        {
            "block_init": ("self.probe = nn.Linear(8, 1)",),
            "block": ("self.probed = self.probe(y.detach()).pow(2).mean()",),
            "loss": ("loss = loss + sum(block.probed for block in module.blocks)",),
        },
    ),
    "weight_of_it": Habit(
        "keeps",
        {
            "block": ("self.penalty = self.down.weight.pow(2).sum()",),
            "loss": ("loss = loss + 0.1 * module.blocks[0].penalty",),
        },
    ),
    "weight_itself": Habit(
        "keeps",
        {
            "block": ("self.kept = self.norm.weight",),
            "loss": ("loss = loss + 0.1 * full(module.blocks[0].kept).pow(2).sum()",),
        },
    ),
    "input": Habit(
        "keeps", {"enter": ("self.given = x",), "between": ('record["given"] = mean(module.given.pow(2).mean())',)}
    ),
    "by_a_hook": Habit(
        "keeps",
        {
            "start": (
                "kept = {}",
                "module.blocks[0].register_forward_hook(lambda block, args, out: kept.update(last=out))",
            ),
            "loss": ('loss = loss + 0.1 * kept["last"].pow(2).mean()',),
        },
        (ALWAYS, FROM),
    ),
    "gradient_kept": Habit(
        "keeps",
        {
            "block": ("self.last = y",),
            "loss": ("module.blocks[0].last.retain_grad()",),
            "between": ('record[f"kept {step}"] = mean(module.blocks[0].last.grad.pow(2).sum()) / par.data_size',),
        },
        (ONCE,),
    ),
    # Uses outputs twice
    "retained": _looped("outputs", backward=("loss.backward(retain_graph=True)", "loss.backward()")),
    "two_losses": _looped(
        "outputs", backward=("loss.backward(retain_graph=True)", "(0.1 * out.pow(2).mean()).backward()")
    ),
    "two_losses_at_once": _looped("outputs", backward="torch.autograd.backward([loss, 0.1 * out.pow(2).mean()])"),
    "two_forwards": _looped("outputs", loss="loss = loss + 0.1 * module(2 * x).pow(2).mean()"),
    "forward_before_backward": _looped("outputs", loss="module(2 * x)"),
    "forward_without_gradients_before_backward": _looped("outputs", loss=("with torch.no_grad():", f"    {EVALUATE}")),
    "two_backwards": _looped(
        "outputs", loss=("other = 0.1 * module(2 * x).pow(2).mean()",), backward=("loss.backward()", "other.backward()")
    ),
    "two_backwards_crossed": _looped(
        "outputs", loss=("other = 0.1 * module(2 * x).pow(2).mean()",), backward=("other.backward()", "loss.backward()")
    ),
    "backward_twice": _looped("outputs", backward=("loss.backward()", "loss.backward()")),
    "detached_target": _looped("outputs", loss="loss = loss + 0.1 * F.mse_loss(out, module(2 * x).detach())"),
    "not_used": _looped("outputs", backward=("out = None", "loss = None", "F.mse_loss(module(x), y).backward()")),
    "accumulated": _looped("outputs", update=("if step % 2:", "    optimizer.step()", "    optimizer.zero_grad()")),
    "micro_batches": _looped(
        "outputs",
        backward=(
            "loss.backward()",
            "for part, target in zip(x.chunk(2), y.chunk(2)):",
            "    (0.5 * F.mse_loss(module(part), target)).backward()",
        ),
    ),
    "accumulate": _looped(
        "outputs",
        backward=(
            "loss.backward()",
            "parts = list(zip(x.chunk(2), y.chunk(2))) * (1 + step % 2)",
            "for part, target in par.accumulate(parts):",
            "    (0.5 * F.mse_loss(module(part), target)).backward()",
        ),
    ),
    "accumulate_unevenly": _looped(
        "outputs",
        (ONCE,),
        backward=(
            "loss.backward()",
            f"count = 2 if {MINE} else 1",
            "for part, target in par.accumulate(list(zip(x.chunk(count), y.chunk(count)))):",
            "    F.mse_loss(module(part), target).backward()",
        ),
    ),
    "accumulate_left": _looped(
        "outputs",
        (ONCE,),
        backward=(
            "loss.backward()",
            "for part, target in par.accumulate(list(zip(x.chunk(2), y.chunk(2)))):",
            "    F.mse_loss(module(part), target).backward()",
            "    break",
        ),
    ),
    "input_gradient": _looped(
        "outputs",
        call=("x.requires_grad_()", "out = module(x)"),
        between=('record[f"input {step}"] = mean(x.grad.abs().sum())',),
        when=(ALWAYS,),
    ),
    "autograd_grad": _looped(
        "outputs",
        backward=(
            "wanted = list(module.parameters())",
            "for p, g in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True)):",
            "    p.grad = g",
        ),
    ),
    "penalty_of_gradient": _looped(
        "outputs",
        call=("x.requires_grad_()", "out = module(x)"),
        loss=("(g,) = torch.autograd.grad(out.sum(), x, create_graph=True)", "loss = loss + 0.1 * g.pow(2).mean()"),
    ),
    "changed_output": _looped("outputs", loss=("out.mul_(2)", "loss = F.mse_loss(out, y)")),
    "output_of_the_last_step": _looped(
        "outputs",
        (FROM,),
        loss=("loss = loss + 0.1 * F.mse_loss(out, last)",),
        start=("last = 0.0 * module(batch(99)[0][par.data_rank :: par.data_size]).detach()",),
        stepped=("last = out",),
    ),
    "output_of_the_last_step_detached": _looped(
        "outputs",
        (ALWAYS,),
        loss="loss = loss + 0.1 * F.mse_loss(out, last)",
        start="last = module(batch(99)[0][par.data_rank :: par.data_size]).detach()",
        stepped="last = out.detach()",
    ),
    # Odd parameters
    "sparse_table": _odd("self.table = nn.Embedding(7, 8, sparse=True)"),
    "limited_table": _odd("self.table = nn.Embedding(7, 8, max_norm=1.0)"),
    "padded_table": _odd("self.table = nn.Embedding(7, 8, padding_idx=0)"),
    "bag": _odd("self.bag = nn.EmbeddingBag(7, 8)", forward=("h = h + self.bag((3 * x.abs()).long() % 7)",)),
    "complex": _odd(
        "self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))",
        forward=("h = (h.to(torch.complex128) @ self.turn).real",),
    ),
    "complex_buffer": _odd(
        'self.register_buffer("turn", torch.randn(8, 8, dtype=torch.complex128))',
        forward=("h = (h.to(torch.complex128) @ self.turn).real",),
    ),
    "complex_block": Habit(
        "odd",
        {
            "block_init": ("self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))",),
            "block": ("y = (y * self.turn).real",),
        },
    ),
    "scalar": _odd("self.scale = nn.Parameter(torch.tensor(1.5))", forward=("h = self.scale * h",)),
    "scalar_of_a_block": Habit(
        "odd", {"block_init": ("self.scale = nn.Parameter(torch.tensor(1.5))",), "block": ("y = self.scale * y",)}
    ),
    "scalars": _odd(
        'self.scales = nn.ParameterDict({"a": nn.Parameter(torch.tensor(1.5))})', forward=('h = self.scales["a"] * h',)
    ),
    "scalar_between_split": Habit(
        "odd", {"block_init": ("self.scale = nn.Parameter(torch.tensor(1.5))",), "inner": ("h = self.scale * h",)}
    ),
    "one_element": _odd("self.shift = nn.Parameter(torch.ones(1))", forward=("h = h + self.shift",)),
    "empty": _odd("self.nothing = nn.Parameter(torch.zeros(0, 8))", forward=("h = h + self.nothing.sum()",)),
    "empty_unused": _odd("self.nothing = nn.Parameter(torch.zeros(0))"),
    "unused": _odd("self.unused = nn.Linear(8, 8)"),
    "integers": _odd("self.ids = nn.Parameter(torch.arange(8), requires_grad=False)", forward=("h = h[:, self.ids]",)),
    "flags": _odd('self.register_buffer("flags", torch.arange(8) % 2 == 0)', forward=("h = h * self.flags",)),
    "single_precision": _odd(
        "self.gain = nn.Parameter(torch.ones(8, dtype=torch.float32))", forward=("h = h * self.gain",)
    ),
    "transposed": _odd(
        "self.mix = nn.Parameter(0.2 * torch.randn(4, 8).t())", forward=("h = h @ self.mix @ self.mix.T",)
    ),
    "expanded": _odd("self.gain = nn.Parameter(torch.ones(1).expand(8))", forward=("h = h * self.gain",)),
    "slice": _odd("self.gain = nn.Parameter(torch.ones(16)[::2])", forward=("h = h * self.gain",)),
    "listed": _odd(
        "self.gains = nn.ParameterList([torch.ones(8), torch.ones(1)])",
        forward=("h = h * self.gains[0] + self.gains[1]",),
    ),
    "conv": _odd("self.conv = nn.Conv1d(1, 1, 3, padding=1)", forward=("h = self.conv(h[:, None])[:, 0]",)),
    "batch_norm": _odd("self.bn = nn.BatchNorm1d(8)", forward=("h = self.bn(h)",)),
    "three_rows": _odd(
        "self.rows = nn.Parameter(torch.randn(3, 8))", forward=("h = h + self.rows[(3 * x[:, 1].abs()).long() % 3]",)
    ),
    "dropout": _odd("self.drop = nn.Dropout(0.5)", forward=("h = self.drop(h)",), built=("model.eval()",)),
    # Evaluates
    "no_grad": _evaluated(),
    "inference": _evaluated(mode="inference_mode"),
    "inference_first": Habit(
        "evaluates", {"start": ("with torch.inference_mode():", '    record["first"] = full(module(EVAL)).clone()')}
    ),
    "with_gradients": _looped("evaluates", stepped=EVALUATE),
    "between_backward_and_step_": _evaluated(at="between"),
    "between_forward_and_backward_": _evaluated(at="loss"),
    "inference_between_forward_and_backward": _evaluated(mode="inference_mode", at="loss"),
    "eval_forgotten": _looped("evaluates", stepped=("module.eval()", "with torch.no_grad():", f"    {EVALUATE}")),
    "on_one_rank": _evaluated(f"if {MINE}:", "    module(EVAL)"),
    "unevenly": _evaluated(
        "for _ in range(2 + par.data_rank):",
        "    total = module(x).pow(2).sum()",
        'record[f"total {step}"] = par.data_sum(total.clone())',
    ),
    "unevenly_inferred": _evaluated(
        "for _ in range(2 + par.data_rank):",
        "    total = module(x).pow(2).sum()",
        'record[f"total {step}"] = par.data_sum(total.clone())',
        mode="inference_mode",
    ),
    "unevenly_at_the_end": Habit(
        "evaluates",
        {"end": ("with torch.no_grad():", "    for _ in range(2 + par.data_rank):", "        module(EVAL)")},
    ),
    "other_sizes": _evaluated("module(x[: len(x) // 2])"),
    "no_rows": _evaluated("module(x[:0])"),
    "skips_a_step_on_one_rank": _looped("evaluates", (ONCE,), loss=(f"if {MINE}:", "    continue")),
    "skips_a_large_loss": _looped(
        "evaluates", loss=("if loss.item() > 1.5:", "    optimizer.zero_grad()", "    continue")
    ),
    "skips_a_step": _looped("evaluates", (ONCE,), loss=("continue",)),
    "block_alone": _evaluated('record[f"block {step}"] = full(module.blocks[0](HIDDEN)).clone()'),
    "head_alone": _evaluated('record[f"head {step}"] = full(module.head(HIDDEN)).clone()'),
    "smaller_batch": _looped("evaluates", call=("x, y = x[: len(x) // 2], y[: len(y) // 2]", "out = module(x)")),
    "autocast": _looped(
        "evaluates", stepped=("with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):", "    module(x)")
    ),
    # Catches
    "forward_fails": _looped(
        "catches",
        (ALWAYS,),
        block=("if NOW == [@k]:", "    raise ValueError"),
        step=(
            "NOW[0] = step",
            "if step == @k:",
            "    try:",
            "        module(x)",
            "    except ValueError:",
            "        NOW[0] = -1",
        ),
    ),
    "forward_fails_in_evaluation": _looped(
        "catches",
        (ALWAYS,),
        block=("if NOW == [@k]:", "    raise ValueError"),
        stepped=(
            "NOW[0] = step",
            "if step == @k:",
            "    try:",
            "        with torch.no_grad():",
            "            module(x)",
            "    except ValueError:",
            "        pass",
            "NOW[0] = -1",
        ),
        built="NOW[0] = -1",
    ),
    "step_skipped_after_a_failure": _looped(
        "catches",
        (ALWAYS,),
        block=("if NOW == [@k]:", "    raise MemoryError"),
        call=(
            "NOW[0] = step",
            "try:",
            "    out = module(x)",
            "except MemoryError:",
            "    optimizer.zero_grad()",
            "    continue",
        ),
    ),
    "fails_on_one_rank": _looped(
        "catches",
        (ONCE,),
        step=(
            "try:",
            f"    if {MINE}:",
            "        raise MemoryError",
            "    module(x).sum().backward()",
            "except MemoryError:",
            "    pass",
            "optimizer.zero_grad()",
        ),
    ),
    "inner_fails": _looped(
        "catches",
        (ALWAYS,),
        inner=("if NOW == [@k]:", "    raise ValueError"),
        step=(
            "NOW[0] = step",
            "if step == @k:",
            "    try:",
            "        module(x)",
            "    except ValueError:",
            "        NOW[0] = -1",
        ),
    ),
    "wrong_shape": _looped("catches", step=("try:", "    module(x[:, :3])", "except RuntimeError:", "    pass")),
    "wrong_index": _looped(
        "catches", step=("try:", "    module.table(torch.tensor([70]))", "except IndexError:", "    pass")
    ),
    "wrong_shape_of_a_target": _looped(
        "catches",
        (ONCE,),
        loss=("try:", "    F.mse_loss(out, y[:, :2]).backward()", "except RuntimeError:", "    pass"),
    ),
    "backward_fails": _looped(
        "catches",
        (ALWAYS,),
        block=("if NOW == [@k]:", "    y = Fails.apply(y)"),
        backward=(
            "try:",
            "    loss.backward()",
            "except MemoryError:",
            "    optimizer.zero_grad()",
            "    NOW[0] = -1",
            "    continue",
        ),
        step=("NOW[0] = step",),
    ),
    "backward_fails_uncleared": _looped(
        "catches",
        (ALWAYS,),
        block=("if NOW == [@k]:", "    y = Fails.apply(y)"),
        backward=("try:", "    loss.backward()", "except MemoryError:", "    NOW[0] = -1", "    continue"),
        step=("NOW[0] = step",),
    ),
    "backward_fails_at_the_end": _looped(
        "catches",
        loss=(
            "def fails(grad):",
            "    raise ValueError",
            "try:",
            "    other = module(x)",
            "    other.register_hook(fails)",
            "    other.sum().backward()",
            "except ValueError:",
            "    optimizer.zero_grad()",
        ),
    ),
    "backward_tried_again": _looped(
        "catches",
        backward=(
            "try:",
            "    loss.backward()",
            "    raise ValueError",
            "except ValueError:",
            "    optimizer.zero_grad()",
            "F.mse_loss(module(x), y).backward()",
        ),
    ),
    "step_fails": _looped(
        "catches",
        (ONCE,),
        update=(
            "def fails(*_):",
            "    raise ValueError",
            "handle = optimizer.register_step_pre_hook(fails)",
            "try:",
            "    optimizer.step()",
            "except ValueError:",
            "    handle.remove()",
            "optimizer.step()",
            "optimizer.zero_grad()",
        ),
    ),
    "step_fails_after": _looped(
        "catches",
        (ONCE,),
        update=(
            "def fails(*_):",
            "    raise ValueError",
            "handle = optimizer.register_step_post_hook(fails)",
            "try:",
            "    optimizer.step()",
            "except ValueError:",
            "    handle.remove()",
            "optimizer.zero_grad()",
        ),
    ),
    "closure_fails": _looped(
        "catches",
        (ONCE,),
        update=(
            "def closure():",
            "    raise ValueError",
            "try:",
            "    optimizer.step(closure)",
            "except ValueError:",
            "    pass",
            "optimizer.step()",
            "optimizer.zero_grad()",
        ),
    ),
    "load_fails": _looped(
        "catches", stepped=("try:", "    module.load_state_dict({})", "except RuntimeError:", "    pass")
    ),
    "interrupted": _looped(
        "catches",
        (ONCE,),
        loss=(
            "def interrupt(*_):",
            "    raise KeyboardInterrupt",
            "try:",
            "    handle = module.blocks[1].register_forward_hook(interrupt)",
            "    module(x)",
            "except KeyboardInterrupt:",
            "    handle.remove()",
        ),
    ),
    "anomaly": _looped("catches", call=("with torch.autograd.detect_anomaly(check_nan=False):", "    out = module(x)")),
    # Hooks
    "forward_hook": _hooked("module.blocks[0].register_forward_hook(lambda block, args, out: 0.5 * out)"),
    "forward_pre_hook": _hooked("module.blocks[0].register_forward_pre_hook(lambda block, args: (0.5 * args[0],))"),
    "layer_hook": _hooked(LAYER, "layer.register_forward_hook(lambda layer, args, out: 0.5 * out)"),
    "layer_pre_hook": _hooked(LAYER, "layer.register_forward_pre_hook(lambda layer, args: (0.5 * args[0],))"),
    "module_hook": _hooked("module.register_forward_hook(lambda net, args, out: 0.5 * out)"),
    "backward_hook": _hooked("module.blocks[0].register_full_backward_hook(lambda block, into, out: (0.5 * into[0],))"),
    "backward_pre_hook": _hooked(
        "module.blocks[0].register_full_backward_pre_hook(lambda block, out: (0.5 * out[0],))"
    ),
    "layer_backward_hook": _hooked(
        LAYER,
        "layer.register_full_backward_hook(lambda layer, into, out: None if into[0] is None else (0.5 * into[0],))",
    ),
    "module_backward_hook": _hooked("module.register_full_backward_hook(lambda net, into, out: None)"),
    "parameter_hook": _hooked('module.get_parameter("@p").register_hook(lambda grad: 0.5 * grad)'),
    "parameter_hook_logs": _hooked(
        "sizes = []",
        'module.get_parameter("@p").register_hook(lambda grad: sizes.append(full(grad.detach().norm())))',
        end=('record["sizes"] = torch.stack(sizes).sum()',),
    ),
    "accumulate_hook": _hooked(
        "def halve(p):", "    p.grad.mul_(0.5)", 'module.get_parameter("@p").register_post_accumulate_grad_hook(halve)'
    ),
    "output_hook": _looped("hooks", loss="out.register_hook(lambda grad: 0.5 * grad)"),
    "tensor_hook": Habit("hooks", {"block": ("if y.requires_grad:", "    y.register_hook(lambda grad: 0.5 * grad)")}),
    "inner_hook": Habit("hooks", {"inner": ("if h.requires_grad:", "    h.register_hook(lambda grad: 0.5 * grad)")}),
    "removed_hook": _looped(
        "hooks",
        call=(
            "handle = module.blocks[0].register_forward_hook(lambda block, args, out: 0.5 * out)",
            "out = module(x)",
            "handle.remove()",
        ),
    ),
    "optimizer_hook": _looped(
        "hooks",
        (ONCE,),
        step=(
            "def halve(*_):",
            "    for p in module.parameters():",
            "        p.grad = None if p.grad is None else 0.5 * p.grad",
            "optimizer.register_step_pre_hook(halve)",
        ),
    ),
    "state_hook": _hooked(
        "module._register_state_dict_hook(lambda net, state, prefix, meta: None)",
        end=('record["state"] = whole(module.state_dict()["head.weight"]).clone()',),
    ),
    "global_hook": _looped(
        "hooks",
        call=(
            "handle = nn.modules.module.register_module_forward_hook(lambda each, _, out: 0.5 * out if "
            "isinstance(each, Block) else None)",
            "out = module(x)",
            "handle.remove()",
        ),
    ),
    "saved_tensors": _looped(
        "hooks",
        call=(
            "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):",
            "    out = module(x)",
        ),
    ),
    # Copies, saves and loads; gradients and optimizers
    "deepcopy": _looped(
        "saves", (ONCE,), stepped=("copied = copy.deepcopy(module)", 'record["copy"] = full(copied(EVAL)).detach()')
    ),
    "shallow_copy": _looped(
        "saves", (ONCE,), stepped=("copied = copy.copy(module)", 'record["copy"] = full(copied(EVAL)).detach()')
    ),
    "loaded_again": _looped(
        "saves",
        start="saved = {n: v.clone() for n, v in module.state_dict().items()}",
        stepped="module.load_state_dict(saved)",
    ),
    "loaded_aliases": _looped("saves", start="saved = module.state_dict()", stepped="module.load_state_dict(saved)"),
    "loaded_assigned": _looped(
        "saves", stepped="module.load_state_dict({n: v.clone() for n, v in module.state_dict().items()}, assign=True)"
    ),
    "loaded_plain": _looped(
        "saves", stepped="module.load_state_dict({n: 0.5 * v for n, v in build().state_dict().items()}, strict=False)"
    ),
    "loaded_plain_assigned": _looped(
        "saves",
        stepped="module.load_state_dict({n: 0.5 * v for n, v in build().state_dict().items()}, strict=False, assign=True)",
    ),
    "loaded_part": _looped(
        "saves", stepped="module.head.load_state_dict({n: 0.5 * v for n, v in build().head.state_dict().items()})"
    ),
    "loaded_block": _looped(
        "saves",
        stepped="module.blocks[0].load_state_dict({n: v.clone() for n, v in module.blocks[1].state_dict().items()})",
    ),
    "loaded_by_par": _looped(
        "saves", stepped="par.load_state_dict({n: 0.5 * v for n, v in build().state_dict().items()})"
    ),
    "full_state": _looped(
        "saves",
        stepped='record |= {f"state {step} {n}": v.clone() for n, v in par.state_dict(full=True, everywhere=True).items()}',
    ),
    "loaded_between": _looped(
        "saves", loss="module.load_state_dict({n: 0.5 * v.clone() for n, v in module.state_dict().items()})"
    ),
    "optimizer_again": _looped(
        "saves", stepped=("kept = copy.deepcopy(optimizer.state_dict())", OPTIMIZER, "optimizer.load_state_dict(kept)")
    ),
    "optimizer_new": _looped("saves", stepped=OPTIMIZER),
    "optimizer_copied": _looped("saves", (ONCE,), stepped="optimizer = copy.deepcopy(optimizer)"),
    "moved": _looped("saves", stepped='module.to("cpu")'),
    "double": _looped("saves", stepped="module.double()"),
    "single_and_back": _looped("saves", stepped="module.float().double()"),
    "plain_model": _looped(
        "saves",
        stepped=(
            "plain = build()",
            "plain.load_state_dict(module.state_dict())",
            'record[f"plain {step}"] = plain(EVAL).detach()',
        ),
    ),
    "torch_clip": _looped(
        "gradients", between='record[f"norm {step}"] = full(nn.utils.clip_grad_norm_(module.parameters(), 0.1))'
    ),
    "par_clip": _looped("gradients", between='record[f"norm {step}"] = par.clip_grad_norm_(0.1).double()'),
    "clip_some": _looped("gradients", between="nn.utils.clip_grad_norm_(module.blocks[0].parameters(), 0.1)"),
    "clip_value": _looped("gradients", between="nn.utils.clip_grad_value_(module.parameters(), 0.01)"),
    "total_norm": _looped(
        "gradients",
        between='record[f"norm {step}"] = full(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))',
    ),
    "module_zero_grad": _looped("gradients", stepped="module.zero_grad()"),
    "zeroed": _looped("gradients", stepped="optimizer.zero_grad(set_to_none=False)"),
    "zeroed_gradients": _looped(
        "gradients",
        (ALWAYS,),
        update=(
            "optimizer.step()",
            "for p in module.parameters():",
            "    if p.grad is not None:",
            "        p.grad.zero_()",
        ),
    ),
    "zeroed_before_backward": _looped("gradients", loss="optimizer.zero_grad()"),
    "none_before_backward": _looped("gradients", loss=("for p in module.parameters():", "    p.grad = None")),
    "not_zeroed": _looped("gradients", update="optimizer.step()"),
    "zeroed_between": _looped("gradients", (ONCE,), between="optimizer.zero_grad()"),
    "scaled_gradients": _looped(
        "gradients", between=("for p in module.parameters():", "    if p.grad is not None:", "        p.grad.mul_(0.5)")
    ),
    "new_gradient": _looped("gradients", between=('p = module.get_parameter("@p")', "p.grad = torch.ones_like(p)")),
    "plain_gradient": _looped("gradients", between=('p = module.get_parameter("@p")', "p.grad = torch.ones(p.shape)")),
    "gradient_data": _looped(
        "gradients",
        between=('p = module.get_parameter("@p")', "if p.grad is not None:", "    p.grad.data = 0.5 * p.grad.data"),
    ),
    "gradient_noise": _looped(
        "gradients",
        between=(
            "torch.manual_seed(3)",
            "for p in module.parameters():",
            "    if p.grad is not None:",
            "        p.grad.add_(0.1 * torch.randn_like(p.grad))",
        ),
    ),
    "gradient_kept_over": _looped(
        "gradients",
        between=('g = module.get_parameter("@p").grad',),
        step=("g = None",),
        end=('record["g"] = whole(g).clone() if g is not None else torch.zeros(())',),
    ),
    "stepped_by_hand": _looped(
        "gradients",
        update=(
            "with torch.no_grad():",
            "    for p in module.parameters():",
            "        if p.grad is not None:",
            "            p -= 0.1 * p.grad",
            "            p.grad = None",
        ),
    ),
    "stepped_by_data": _looped(
        "gradients",
        update=(
            "for p in module.parameters():",
            "    if p.grad is not None:",
            "        p.data = p.data - 0.1 * p.grad.data",
            "optimizer.zero_grad()",
        ),
    ),
    "stepped_by_data_in_place": _looped(
        "gradients",
        update=(
            "for p in module.parameters():",
            "    if p.grad is not None:",
            "        p.data.add_(p.grad, alpha=-0.1)",
            "optimizer.zero_grad()",
        ),
    ),
    "stepped_twice": _looped("gradients", update=("optimizer.step()", "optimizer.step()", "optimizer.zero_grad()")),
    "closure": _looped(
        "gradients",
        update=(
            "def closure():",
            "    optimizer.zero_grad()",
            "    loss = F.mse_loss(module(x), y)",
            "    loss.backward()",
            "    return loss",
            "optimizer.step(closure)",
            "optimizer.zero_grad()",
        ),
    ),
    "rate": _looped("gradients", step='optimizer.param_groups[0]["lr"] = 0.05'),
    "sam": _looped(
        "gradients",
        between=(
            "with torch.no_grad():",
            "    moves = [0.1 * p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]",
            "    for p, move in zip(module.parameters(), moves):",
            "        p.add_(move)",
            "optimizer.zero_grad()",
            "F.mse_loss(module(x), y).backward()",
            "with torch.no_grad():",
            "    for p, move in zip(module.parameters(), moves):",
            "        p.sub_(move)",
        ),
    ),
}
"""Habits by name."""
