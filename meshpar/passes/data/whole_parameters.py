"""Parameters in a forward: the local part of a split one, and those that data ranks keep whole and average."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from meshpar._torch.autograd import part_here
from meshpar._torch.groups import root_of
from meshpar._torch.tensors import call_hooks, held_part
from meshpar._torch.units import is_shard, versions
from meshpar.core.errors import MeshparError, ParallelError
from meshpar.core.mesh import sizes_text
from meshpar.core.patterns import class_name, covers, is_called
from meshpar.passes.tensor.collectives import _view, copy_weight, link
from meshpar.passes.tensor.context import Context
from meshpar.same_bits.trees import average_
from meshpar.step.inner_calls import Product, installed, own_forward, record, set_forward
from meshpar.step.moment import Moment
from meshpar.tensors.placements import local_tensor


def is_transposed(module: nn.Module) -> bool:
    """Tell GPT-2's Conv1D, whose weight is (in, out), from a linear layer, whose weight is (out, in)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ in ("transformers.pytorch_utils", "meshpar.models.gpt2")


def replaced_problems(name: str, module: nn.Module, base: type[nn.Module]) -> Iterator[str]:
    """Yield why a style that knows the forward of ``base`` would compute something else in a module's place."""
    kind = type(module)
    skips = f"which a style for {base.__name__} would skip"
    leave = f"leave it whole: {whole_styles([name])}, or give it a style of your own"
    if parametrize.is_parametrized(module):
        parts = ", ".join(sorted(module.parametrizations))  # type: ignore[arg-type]
        yield f"{name} computes its {parts} by a parametrization, {skips}; {leave}"
    elif kind.forward is not base.forward and not is_transposed(module):
        overrides = f"with a forward of its own, which a style for {base.__name__} would skip"
        yield f"{name} is a {class_name(module)} {overrides}; {leave}"
    elif own_forward(module) is not None:
        yield f"{name} has a forward that was set on it, {skips}; {leave}"
    elif kind is NonDynamicallyQuantizableLinear:
        around = name.rpartition(".")[0] or "the model"
        yield (
            f"{name} is a part of {around}, a nn.MultiheadAttention, which reads its weights itself and cannot be "
            f"split; {leave}"
        )
    if call_hooks(module) or call_hooks(module, backward=True):
        yield (
            f"{name} has hooks, which would see a rank's part of what they expect (or weights that they compute, as "
            f"weight_norm of torch.nn.utils does, would be skipped); register them on a module around it, or {leave}"
        )


def whole_styles(names: Sequence[str]) -> str:
    """Return the pass that leaves modules whole, as a user writes it."""
    return f"TensorParallel(styles={{{', '.join(f'{name!r}: None' for name in names)}}})"


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (input features, output features) of a linear layer, None for anything else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def empty_problems(name: str, what: str, count: int, size: int) -> Iterator[str]:
    """Yield a split that leaves ranks with nothing; one that leaves the last rank less is exact."""
    if -(-count // size) * (size - 1) >= count:
        yield (
            f"{name} has {count} {what}, which tp={size} splits so that some ranks would hold none; "
            f"{sizes_text('tp', count)}"
        )


def set_product(module: nn.Linear, product: Product) -> None:
    """Let a linear layer multiply by ``(x, weight, bias) -> y``, also where a style has given it another forward."""
    record(module).product = product
    if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
        set_forward(module, lambda x: product(x, module.weight, module.bias))


def linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a layer with another weight and bias than its own."""
    forward = installed(module)
    if forward is not None and forward.product is not None:
        return forward.product(x, weight, bias)
    return F.linear(x, weight.t() if is_transposed(module) else weight, bias)


def local(parameter: Any) -> Any:
    """Return this rank's part of a parameter, as autograd knows it; None stays None."""
    if isinstance(parameter, DTensor) and not is_shard(parameter):
        return part_here(parameter)
    if parameter is not None:
        _refuse_use(parameter)
    return None


def _refuse_use(parameter: Tensor) -> NoReturn:
    if is_shard(parameter):
        raise ParallelError(
            "a layer is called where its weights are not gathered: outside of its block, or of a call of the module; "
            "call par.module, or let a method of the model's own enter by par.register_method(name)"
        )
    raise ParallelError(
        f"a plain tensor {tuple(parameter.shape)} replaced a layer's part of a parameter, a DTensor; "
        "torch.func.functional_call with whole weights cannot work on a parallel module: load them with "
        "par.load_state_dict, average weights with par.averaged, or hand in DTensors placed like the parameters"
    )


def strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    return torch.empty(shape, device="meta").stride()


def shard_parameter(module: nn.Module, name: str, dim: int, context: Context) -> None:
    """Replace a parameter by a DTensor split along ``dim``; a tied one that was replaced stays the same."""
    _place(module, name, Shard(dim), context)


def keep_whole(module: nn.Module, context: Context) -> None:
    """Make DTensors of the parameters in ``module`` that nothing split, so that loops see one kind of parameter."""
    for child in module.modules():
        for name in child._parameters:
            _place(child, name, Replicate(), context)


def _place(module: nn.Module, name: str, placement: Shard | Replicate, context: Context) -> None:
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    replacement = _taken(parameter, context)
    if replacement is None:
        part, mesh = parameter.detach(), context.mesh
        placements: list[Placement] = [placement]
        if isinstance(part, DTensor):  # experts, which another axis divided before
            mesh, placements = part.device_mesh, list(part.placements)
            placements[(mesh.mesh_dim_names or ()).index((context.mesh.mesh_dim_names or ("",))[0])] = placement
            part = part.to_local()
        if isinstance(placement, Shard):
            part = part.chunk(context.size, placement.dim)[context.rank].clone(memory_format=torch.contiguous_format)
        replacement = part_of(parameter, part, mesh, placements)
        was, now = weakref.ref(parameter), weakref.ref(replacement)
        context.placed.update({id(parameter): (was, now), id(replacement): (now, now)})
    module._parameters[name] = replacement


def _taken(parameter: nn.Parameter, context: Context) -> nn.Parameter | None:
    """Return the parameter that took the place of ``parameter``, or is in place already; None where none did."""
    # numbers of objects are given again once an object is gone, so a reference says whose number it was
    was, now = context.placed.get(id(parameter), (None, None))
    return now() if was is not None and now is not None and was() is parameter else None


def part_of(parameter: nn.Parameter, part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Return a parameter in the place of ``parameter``, of which this rank holds ``part``."""
    whole = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=strides(parameter.shape)
    )
    replacement = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(replacement).update(vars(parameter))
    return replacement


def see_whole(module: nn.Module, blocks: set[nn.Module], styled: set[nn.Module]) -> None:
    """Let modules that know nothing of the split compute with plain tensors of what every rank holds whole."""
    # Each block, which may be gathered or recomputed alone, does so for all that is in it, whose methods and parameters
    # any code inside may use, and the outermost module for what is in no block: a recomputation repeats the forward.
    # A module that is called alone does so for itself, and without a styled one in it for its children.
    in_blocks = {child for block in blocks if block is not module for child in block.modules()}
    for child in module.modules():
        if child is module or child in blocks:
            inner_modules = [inner for inner in child.modules() if child in blocks or inner not in in_blocks]
        elif not _needs_plain(child):
            continue
        else:
            inner_modules = [child] if not styled.isdisjoint(list(child.modules())[1:]) else list(child.modules())
        see_plain(child, list(filter(_needs_plain, inner_modules)), "tensor axis")


def _needs_plain(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) and not _reads(module)


def _reads(module: nn.Module) -> bool:
    forward = installed(module)
    return forward is not None and forward.reads_parameters


def see_plain(module: nn.Module, inside: list[nn.Module], over: str) -> None:
    """In ``module``'s forward let modules ``inside`` see as plain tensors what all ranks ``over`` hold whole."""
    record(module).sees[over], inner = inside, module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tables = [child._parameters for child in inside]
        places = [(table, name, value) for table in tables for name, value in table.items() if is_whole(value)]
        seen: list[_Seen] = []
        try:
            for table, name, value in places:
                plain: Any = part_here(value)
                plain = plain if plain.ndim else link(plain, _view, _join_gradient)
                table[name] = plain
            if not torch.compiler.is_compiling():
                values = [table[name] for table, name, _ in places]
                seen = list(zip(places, values, versions(values)))
            output = inner(*args, **kwargs)
            if replaced := _changed(seen, written=False):
                refuse_written(replaced)
            return output
        except RuntimeError as error:  # autograd's of views
            if not isinstance(error, MeshparError) and (written := _changed(seen, written=True)):
                refuse_written(written, error)
            raise
        finally:
            for table, name, value in places:
                table[name] = value

    set_forward(module, forward)


_Seen = tuple[tuple[dict[str, Any], str, Any], Any, Any]
"""A parameter's place in its module, the plain tensor that stands there, and the numbers of its versions."""


def _changed(seen: Sequence[_Seen], *, written: bool) -> str | None:
    """Return the name of a plain tensor that was replaced, or got other memory; ``written``: that was written."""
    for ((table, name, _), value, before), now in zip(seen, versions([value for _, value, _ in seen])):
        if before != now if written else before[-1] != now[-1] or table[name] is not value:
            return name
    return None


def refuse_written(name: str, cause: Exception | None = None) -> NoReturn:
    """Refuse a forward that writes a parameter, which led to the error ``cause``."""
    raise ParallelError(
        f"{name} was written or replaced in a forward: a gathered copy is freed afterwards, and copies that ranks "
        "keep would differ. Write between steps, outside of the module's calls, into the parameters of par.module "
        "(under torch.no_grad(), by operators that DTensors have), or register as a buffer what forward updates"
    ) from cause


def _join_gradient(grad: Tensor) -> Tensor:
    """Return the gradient of a number: a DTensor where it met one, such as logits that are split for the loss."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def is_whole(parameter: Any) -> bool:
    """Return whether a parameter is a DTensor that all ranks of its mesh hold whole, and that no FSDP unit reduces."""
    if not isinstance(parameter, DTensor) or is_shard(parameter):
        return False
    return all(placement.is_replicate() for placement in parameter.placements)


def sum_gradients(name: str, module: nn.Module, context: Context) -> None:
    """Sum the partial gradients of the module's own parameters inside autograd, by ``copy_weight``."""
    # a hook on the parameter would sum what earlier micro-batches accumulated once more
    inner, group = module.forward, context.features

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {leaf: value for leaf, value in module._parameters.items() if value is not None}
        if parameters:
            context.arrive(name, next(iter(parameters.values())))
        try:
            for leaf, value in parameters.items():
                module._parameters[leaf] = copy_weight(local(value), group)  # type: ignore[assignment]
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    set_forward(module, forward, reads_parameters=True)


def kept_whole(module: nn.Module, patterns: Sequence[str] | Literal["frozen"]) -> dict[str, nn.Parameter]:
    """Return the parameters, by their first name, that FSDP2 does not manage: ``patterns``, scalars and empty ones."""
    named = module.named_parameters(remove_duplicate=False)
    named = ((name, parameter) for name, parameter in named if not is_lazy(parameter) and not is_shard(parameter))
    chosen = {
        id(parameter)
        for name, parameter in named
        if not parameter.ndim
        or not parameter.numel()
        or is_kept(parameter)
        or (not parameter.requires_grad if patterns == "frozen" else any(covers(pattern, name) for pattern in patterns))
    }
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) in chosen}


def is_kept(parameter: nn.Parameter) -> bool:
    """Return whether data ranks keep a parameter whole already."""
    return "_meshpar_whole" in vars(parameter)


@final
class WholeParameters(Moment):
    """Parameters that every data rank holds whole, averaged at the end of a backward; plain tensors in a forward."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...], *, by_tree: bool) -> None:
        self._module, self._mesh, self._axes, self._by_tree = module, mesh, axes, by_tree
        self._taken: dict[str, nn.Parameter] = {}

    def take(self, names: Sequence[str]) -> None:
        """Take the parameters that have these names, tied ones once; those that were taken stay the same."""
        module = self._module
        named = {name: module.get_parameter(name) for name in names}
        placed = {id(weight): weight if is_kept(weight) else self._place(weight) for weight in named.values()}
        self._taken = {name: placed[id(parameter)] for name, parameter in named.items()}
        holders = []
        for child in module.modules():
            names_here = [name for name, value in child._parameters.items() if id(value) in placed]
            for name in names_here:
                child._parameters[name] = placed[id(child._parameters[name])]
            if names_here and not _reads(child):
                holders.append(child)
        # Code of any module around may read them, and a block may be called, or recomputed, alone.
        for child in module.modules():
            within = set(child.modules())
            if is_called(child) and (inner_holders := [holder for holder in holders if holder in within]):
                see_plain(child, inner_holders, "data ranks")

    def _place(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter as a DTensor that data axes replicate, split over other axes (``ep``) as before."""
        mesh, names, placements = self._mesh, self._axes, [Replicate()] * len(self._axes)
        if isinstance(parameter, DTensor):
            mesh, divided = root_of(parameter.device_mesh), parameter.device_mesh.mesh_dim_names or ()
            copies = [axis for axis in names if axis not in divided]
            names = (*copies, *divided)
            placements = [*[Replicate()] * len(copies), *parameter.placements]  # type: ignore[list-item]
        part = local_tensor(parameter)
        part = part if part.is_meta else part.to(self._mesh.device_type)
        whole = part_of(parameter, part, mesh[names], placements)
        vars(whole)["_meshpar_whole"] = True
        return whole

    def _named(self) -> dict[str, Any]:
        """Return the parameters by name: the module's, or the ones that were taken where their modules have moved."""

        def now(name: str, taken: nn.Parameter) -> nn.Parameter:
            try:
                return self._module.get_parameter(name)
            except AttributeError:
                return taken

        return {name: now(name, taken) for name, taken in self._taken.items()}

    def versions(self) -> dict[str, Any]:
        """Return by name numbers that change when somebody writes a parameter or gives it other memory."""
        parameters = self._named()
        return dict(zip(parameters, versions([held_part(parameter) for parameter in parameters.values()])))

    @torch.no_grad()
    def reduce(self) -> list[nn.Parameter]:
        """Average the gradients, in float32 or wider; return the parameters that had none here. Collective."""
        trained = [parameter for parameter in self._named().values() if parameter.requires_grad]
        if not trained:
            return []
        missing = [weight for weight in trained if weight.grad is None]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        grads = [local_tensor(weight.grad) for weight in trained]
        flat = torch.cat([grad.reshape(-1).to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads])
        average_(flat, [self._mesh.get_group(axis) for axis in self._axes], by_tree=self._by_tree)
        for grad, part in zip(grads, flat.split([gradient.numel() for gradient in grads])):
            grad.copy_(part.view_as(grad))
        return missing
