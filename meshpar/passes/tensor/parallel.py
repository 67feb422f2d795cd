"""TensorParallel: split the features of layers over an axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.in_parts import set_parts
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, sizes_text
from meshpar.core.passes import Facts, Installed, Pass, Role, Stage, find_blocks, unmatched
from meshpar.core.patterns import covers, find_modules, matches, suggestion
from meshpar.passes.data.whole_parameters import keep_whole, see_whole, shard_parameter, whole_styles
from meshpar.passes.tensor.collectives import PartsGroup
from meshpar.passes.tensor.context import Arrivals, Context, Style
from meshpar.passes.tensor.parts import CopiedHeads, Experts, Parts
from meshpar.passes.tensor.random import SplitState, draws_random
from meshpar.passes.tensor.styles import PARAMETER_STYLES, PER_HEAD, Colwise, parse
from meshpar.passes.tensor.styles import Sequence as SequenceStyle
from meshpar.step.inner_calls import installed, set_attribute

_WHOLE_SHARE = 0.25


@final
@dataclass(frozen=True, slots=True)
class _Table:
    """A parsed table: pattern -> style of modules, text of parameters (None: whole); wrong entries; styled modules."""

    names: list[str]  # of all parameters
    modules: dict[str, Style] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    styled: list[tuple[str, nn.Module, Style]] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        """Return whether a pattern names the parameter ``name`` itself."""
        return any(matches(pattern, name) for pattern in self.parameters)

    def named(self, *texts: str) -> dict[str, str]:
        """Return the parameters with one of these texts, and the text of each."""
        pairs = [(pattern, text) for pattern, text in self.parameters.items() if text in texts]
        return {name: text for pattern, text in pairs for name in self.names if matches(pattern, name)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(Pass):
    """Split linear layers, attention heads and the vocabulary over the ``tp`` axis (Megatron-LM, arXiv 1909.08053).

    >>> from meshpar import FullyShard, Plan, TensorParallel
    >>> print(Plan("dp_shard=4,tp=2", [TensorParallel(sequence_parallel=True), FullyShard()]))
    dp_shard=4,tp=2 [TensorParallel -> FullyShard]

    Args:
        sequence_parallel: split activations between layers along the sequence (arXiv 2205.05198). The sequence length
            must be a multiple of the axis's size.
        loss_parallel: keep the logits split over the vocabulary, as a DTensor that :func:`meshpar.token_loss` accepts.
        styles: module pattern -> style, which replaces the entry of the layout's table. None removes the entry. The
            styles are ``region``, ``region:ATTRIBUTE,...``, ``colwise``, ``packed_colwise:N``, ``colwise_gather``,
            ``rowwise``, ``rowwise_split``, ``vocab``, ``features``, ``head``, ``sequence`` and ``grad_sum``. A pattern
            that names a parameter (``blocks.*.attn.sinks``) supports ``per_head``, which splits the first dim,
            ``grad_sum``, and None: whole, used with whole features.
        parts: number of equal parts in which features are computed on every mesh, a power of two that ``tp`` divides.
            The results then have the same bits for every size of ``tp``, also without ``tp``
            (docs/same_bits.md). None: one part a rank.
    """

    sequence_parallel: bool = False
    loss_parallel: bool = False
    styles: Mapping[str, Any] = field(default_factory=dict)
    parts: int | None = None

    name = "TensorParallel"
    stage = Stage.TENSOR
    roles = MappingProxyType({"tp": Role.FEATURES})

    @property
    def splits_sequence(self) -> bool:  # type: ignore[override]
        return self.sequence_parallel

    @property
    def works_without_axes(self) -> bool:  # type: ignore[override]
        return self.parts is not None

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        size = mesh.axes["tp"]
        problems = self._every_problem(module, layout, size)
        if self.parts is not None:
            problems = self._problems_in_parts(module, layout, size, self.parts)
        # those that differ by the number of a layer once
        alike: dict[str, list[str]] = {}
        for problem in problems:
            alike.setdefault(re.sub(r"(?<=\.)\d+(?=[.'])", "*", problem), []).append(problem)
        for first, *more in alike.values():
            yield first + (f" (and {len(more)} more like it)" if more else "")

    def conflicts(self, passes: Sequence[Pass], mesh: MeshSpec) -> Iterator[str]:
        for other in passes if self.parts is not None else ():
            sizes = [mesh.axes.get(axis, 1) for axis in other.axes]
            if not other.computes_in_parts and (not sizes or max(sizes) > 1):
                yield (
                    f"{other.name} does not compute in the equal parts of TensorParallel(parts={self.parts}); drop "
                    f"{other.name}, or drop parts= from TensorParallel"
                )

    def bits_problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if self.parts is None and (size := mesh.axes["tp"]) > 1:
            yield (
                f"same_bits on tp={size} needs features that are computed in equal parts; write "
                f"TensorParallel(parts={max(8, size)}) on this mesh and on every other one"
            )

    def _problems_in_parts(self, module: nn.Module, layout: ModelLayout, size: int, parts: int) -> Iterator[str]:
        """Yield why features cannot be computed in ``parts`` equal parts by ``size`` ranks."""
        if (above := 1 << (size - 1).bit_length()) != size:
            yield f"tp={size} is no power of two, as TensorParallel(parts=...) needs; use tp={above // 2} or {above}"
            return
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1 or parts & (parts - 1) or parts % size:
            yield (
                f"TensorParallel(parts={parts!r}) is no power of two that tp={size} divides; write parts={max(8, size)}"
            )
            return
        problems = list(self._reasons(module, layout, parts))
        fewer = [1 << power for power in reversed(range(parts.bit_length() - 1)) if problems and 1 << power >= size]
        fits = next((count for count in fewer if not any(self._reasons(module, layout, count))), None)
        for problem in problems:
            # without the sizes of tp that it proposes
            text = problem.replace(f"tp={parts}", f"parts={parts}")
            text = re.sub(r"; (use tp=[^;]*|drop tp from the mesh)$", "", text)
            yield text if fits is None else f"{text}; use parts={fits}"

    def _reasons(self, module: nn.Module, layout: ModelLayout, parts: int) -> Iterator[str]:
        """Yield why features cannot be computed in ``parts`` equal parts, by any number of ranks."""
        yield from self._every_problem(module, layout, parts)
        if self.sequence_parallel and (layout.dropout or draws_random(module)):
            yield (
                "the model has dropout between split layers, whose masks follow the parts of the sequence that ranks "
                "have; set dropout to 0, or use TensorParallel(sequence_parallel=False)"
            )
        table = self._table(module, layout)
        for name, child, style in table.styled:
            remedy = whole_styles(_split_together(table, name))
            dims, named = style.split_dims(child), child.named_parameters(recurse=False)
            # a module of another kind may have fewer dims
            lengths = (value.shape[dims[leaf]] for leaf, value in named if value.ndim > dims.get(leaf, value.ndim))
            uneven = next((length for length in lengths if length % parts), 0)
            nested = next((other for other, _, _ in table.styled if other.startswith(f"{name}.")), None)
            if self.sequence_parallel and isinstance(style, SequenceStyle) and nested:
                yield (
                    f"{name} has the style 'sequence' and runs {nested}, which has a style, too, so that equal "
                    "parts of the sequence would be cut twice; use sequence_parallel=False, or drop parts= from "
                    "TensorParallel"
                )
            elif not style.computes_in_parts:
                yield (
                    f"{name} has the style {type(style).__name__}, which does not compute in equal parts; leave it "
                    f"whole: {remedy}, or drop parts= from TensorParallel"
                )
            elif uneven:
                yield (
                    f"{name} splits {uneven} rows or features, which parts={parts} does not divide; leave it whole: "
                    f"{remedy}"
                )

    def _every_problem(self, module: nn.Module, layout: ModelLayout, size: int) -> Iterator[str]:
        if layout.tensor.refusal:
            yield layout.tensor.refusal
            return
        table = self._table(module, layout)
        yield from table.problems
        if not (table.modules or any(table.parameters.values()) or table.problems):
            yield (
                "TensorParallel has nothing to do: the layout has no table; give ModelLayout(tensor={'layers.*.up': "
                "'colwise', ...}), or for LoRA meshpar.training.add_adapters(model, LoRA(...)) in the place of peft, "
                "which returns a layout"
            )
        for pattern, style in table.modules.items():
            matched = list(find_modules(module, pattern))
            if not matched:
                yield unmatched(f"tensor-parallel pattern {pattern!r}", pattern, module)
            for name, child in matched:
                for problem in style.problems(name, child, size):
                    yield problem.replace(whole_styles([name]), whole_styles(_split_together(table, name)))
        for name, owner, parts in _parameter_styles(module, table):
            yield from parts.problems(name, owner, size)
        yield from self._head_problems(module, layout, size)
        yield from self._tie_problems(module, layout)
        yield from _region_problems(module, table)
        yield from _own_problems(module, table)
        yield from _sum_problems(table)
        if self.sequence_parallel and not any(isinstance(style, SequenceStyle) for style in table.modules.values()):
            yield (
                "sequence_parallel needs the layout to say which modules run between regions ('sequence'); it names "
                "none: leave it off"
            )
        lookups = [style for _, child, style in table.styled if isinstance(child, nn.Embedding)]
        if self.sequence_parallel and not any(style.splits_positions for style in lookups):
            yield (
                "sequence_parallel needs an embedding in the layout's tensor-parallel table that splits the sequence "
                "('vocab', or 'sequence' for positions); it names none, so every rank would treat the whole sequence "
                "as its part: name it, or leave sequence_parallel off"
            )
        if self.loss_parallel and not any(style.splits_logits for style in table.modules.values()):
            yield "loss_parallel needs a 'head' in the layout's tensor-parallel table; it names none: leave it off"

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if mesh.spans_nodes("tp"):
            yield (
                f"axis 'tp' (size {mesh.axes['tp']}) spans nodes of {mesh.ranks_per_node} ranks: every block then "
                "sends its activations, batch x sequence x features, four times a step between nodes; keep tp within "
                "a node"
            )
        split, sizes = self.shards(module, layout), {name: p.numel() for name, p in module.named_parameters()}
        meant = [pattern for pattern, style in layout.tensor.styles.items() if style is None]
        whole = [name for name in sizes if name not in split and not any(covers(pattern, name) for pattern in meant)]
        whole = sorted(whole, key=lambda name: -sizes[name])
        share = sum(sizes[name] for name in whole) / max(1, sum(sizes.values()))
        if mesh.axes["tp"] > 1 and share > _WHOLE_SHARE:
            yield (
                f"tensor parallelism leaves {share:.0%} of the parameters whole on every rank of tp, the largest "
                f"{whole[0]}, because the layout's table does not name them; give linear layers and embeddings among "
                "them a style, or None to what is meant to stay whole, or use data axes instead of tp"
            )

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        table = self._table(module, layout)
        owners, split = {name for name, _, style in table.styled if style.splits}, table.named(PER_HEAD)
        return {name for name in table.names if name.rpartition(".")[0] in owners or name in split}

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> Installed:
        axis = mesh["tp"]
        arrivals = None if facts.guards == "off" else Arrivals(always=facts.guards == "always")
        return Installed(facts=[self.split(module, layout, axis, axis.get_group(), axis.get_local_rank(), arrivals)])

    def split(
        self,
        module: nn.Module,
        layout: ModelLayout,
        axis: DeviceMesh,
        group: Any,
        rank: int,
        arrivals: Arrivals | None = None,
    ) -> Context:
        """Split ``module`` in place as ``rank`` of ``axis`` holds it, with collectives on ``group``."""
        draws = (layout.dropout or draws_random(module)) and not self.sequence_parallel
        context = Context(
            mesh=axis,
            group=group,
            features=group if self.parts is None else PartsGroup(group, self.parts),
            rank=rank,
            root=module,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            random=SplitState() if draws else None,
            arrivals=arrivals,
            inputs=layout.tensor.hidden_inputs,
        )
        set_parts(axis, self.parts or 0)
        table = self._table(module, layout)
        # A wrapper that takes a module's own parameters goes inside of the one that prepares its inputs.
        styled = [*_parameter_styles(module, table), *table.styled]
        styled = list(_with_copied_heads(module, layout, styled, context.parts))
        context.regions.update({name: style for name, _, style in styled if style.is_region})
        context.styles.update({name: style for name, _, style in styled})
        for name, child, style in styled:
            for parameter, dim in style.split_dims(child).items():
                shard_parameter(child, parameter, dim, context)
            style.shard(name, child, context)
        keep_whole(module, context)
        context.placed.clear()
        for name, child, style in styled:
            style.install(name, child, context)
        see_whole(module, {block for _, block in find_blocks(module, layout)}, {child for _, child, _ in styled})
        return context

    def _table(self, module: nn.Module, layout: ModelLayout) -> _Table:
        """Return the layout's table, parsed; this pass's entries replace those of the modules that they match."""
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        table, entries = _Table(names), dict(layout.tensor.styles)
        for pattern, text in self.styles.items():
            replaced = _take_out(module, entries, pattern)
            if text is not None:
                entries[pattern] = text
            elif any(matches(pattern, name) for name in names):
                entries[pattern] = None
            elif not replaced:
                table.problems.append(
                    f"TensorParallel(styles={{{pattern!r}: None}}) matches no entry of the table; "
                    f"{suggestion(pattern, entries)}"
                )
        for pattern, text in entries.items():
            if any(matches(pattern, name) for name in names):
                table.parameters[pattern] = text
                if text not in (*PARAMETER_STYLES, None):
                    styles = ", ".join(PARAMETER_STYLES)
                    table.problems.append(
                        f"{pattern!r} names a parameter, which supports the styles {styles}, or None; got {text!r}"
                    )
                continue
            if text is None:
                continue
            try:
                style = table.modules[pattern] = parse(text)
            except ValueError as error:
                table.problems.append(f"{pattern!r}: {error}")
            else:
                if self.parts is not None and isinstance(style, Experts) and style.otherwise is not None:
                    style = table.modules[pattern] = style.otherwise
                table.styled.extend((name, child, style) for name, child in find_modules(module, pattern))
        return table

    def _head_problems(self, module: nn.Module, layout: ModelLayout, size: int) -> Iterator[str]:
        for pattern, heads in layout.tensor.heads.items():
            if not any(find_modules(module, pattern)):
                yield unmatched(f"layout.tensor.heads pattern {pattern!r}", pattern, module)
            if heads % size and not (pattern in layout.tensor.copied_heads and size % heads == 0):
                yield f"{pattern} has {heads} heads, which tp={size} does not divide; {sizes_text('tp', heads)}"

    def _tie_problems(self, module: nn.Module, layout: ModelLayout) -> Iterator[str]:
        split = self.shards(module, layout)
        for group in layout.tied:
            tied = [name for name in group if name in split]
            if tied and len(tied) < len(group):
                missing = next(name for name in group if name not in split)
                yield (
                    f"{tied[0]} is tied to {missing}, and only {tied[0]} is split over tp; give both a style, or "
                    "neither"
                )


def _take_out(module: nn.Module, entries: dict[str, Any], pattern: str) -> bool:
    """Take the modules that ``pattern`` matches out of a table, and return whether there were any."""
    is_entry = pattern in entries
    entries.pop(pattern, None)
    names = {entry: [name for name, _ in find_modules(module, entry)] for entry in entries}
    taken = {name for name, _ in find_modules(module, pattern)}
    hit = [entry for entry in entries if taken.intersection(names[entry])]
    for entry in hit:
        style = entries.pop(entry)
        entries.update({name: style for name in names[entry] if name not in taken})
    return is_entry or bool(hit)


def _with_copied_heads(
    module: nn.Module, layout: ModelLayout, styled: list[tuple[str, nn.Module, Style]], size: int
) -> Iterator[tuple[str, nn.Module, Style]]:
    """Yield styled modules, with the projections to fewer heads than ranks in a style of their own."""
    heads = {
        name: layout.tensor.heads[pattern]
        for pattern in layout.tensor.copied_heads
        for name, _ in find_modules(module, pattern)
    }
    ratios: dict[nn.Module, int] = {}
    for name, child, style in styled:
        if style == Colwise() and heads.get(name, size) % size:
            if layout.tensor.head_ratio:
                owner = module.get_submodule(name.rpartition(".")[0])
                changes = installed(owner)
                attributes = vars(owner) if changes is None else {**vars(owner), **changes.attributes}
                ratios[owner] = attributes[layout.tensor.head_ratio] * heads[name] // size
            style = CopiedHeads(heads[name])
        yield name, child, style
    for owner, ratio in ratios.items():
        set_attribute(owner, layout.tensor.head_ratio, ratio)


def _parameter_styles(module: nn.Module, table: _Table) -> list[tuple[str, nn.Module, Style]]:
    """Return (owner's name, owner, style) for the owners of parameters that the table names one by one."""
    owners: dict[str, dict[str, str]] = {}
    for name, text in table.named(*PARAMETER_STYLES).items():
        owners.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = text
    return [
        (
            owner,
            module.get_submodule(owner),
            Parts(
                dims={leaf: (0, 1) for leaf, text in leaves.items() if text == PER_HEAD},
                summed=tuple(leaf for leaf, text in leaves.items() if text != PER_HEAD),
            ),
        )
        for owner, leaves in owners.items()
    ]


def _split_together(table: _Table, name: str) -> list[str]:
    """Return the modules and parameters that are split, or whole, together with ``name``."""
    styles = {path: style for path, _, style in table.styled}
    regions = [path for path, style in styles.items() if style.is_region and name.startswith(f"{path}.")]
    if not regions and styles[name].stands_alone:
        return [name]
    region = max(regions, key=len, default=None)
    around = name.rpartition(".")[0] if region is None else region
    paths = [path for path in (*styles, *table.named(*PARAMETER_STYLES)) if path.startswith(f"{around}.")]
    return paths if region is None else [region, *paths]


def _own_problems(module: nn.Module, table: _Table) -> Iterator[str]:
    """Yield parameters of modules with split projections that no style covers: they may count features."""
    styled = {name for name, _, _ in table.styled}
    split = [name for name, _, style in table.styled if style == Colwise()]
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in split):
        for leaf, parameter in module.get_submodule(owner).named_parameters(recurse=False):
            name = f"{owner}.{leaf}".lstrip(".")
            if owner not in styled and not table.covers(name):
                patterns = [*table.modules, *table.parameters]
                entries = [entry for entry in patterns if matches(entry.rpartition(".")[0], owner)]
                yield (
                    f"{name} {tuple(parameter.shape)} has no style among projections split by heads or "
                    f"features; give '{name}' 'per_head' where its first dim counts them, 'grad_sum' where "
                    "each rank uses the whole of it with its heads or features, None where it meets whole features (a "
                    f"scale of the output), or leave its projections whole: {whole_styles(sorted(entries))}"
                )


def _sum_problems(table: _Table) -> Iterator[str]:
    """Yield modules whose gradients would be summed though every rank knows the whole: nothing there is split."""
    parting = [(name, child) for name, child, style in table.styled if style.splits and style != Colwise(gather="yes")]
    split = {name.rpartition(".")[0] for name, _ in parting}
    split |= {name for name, child in parting if not isinstance(child, nn.Linear)}
    for name in (name for name, _, style in table.styled if style.sums_gradients):
        owner = name.rpartition(".")[0]
        if not any(inner == owner or inner.startswith(f"{owner}.") for inner in split):
            yield (
                f"{name} sums its gradient over tp, but nothing in {owner or 'the model'} is split, so the gradient "
                f"would count once per rank; leave {name} whole, too: TensorParallel(styles={{{name!r}: None}})"
            )


def _region_problems(module: nn.Module, table: _Table) -> Iterator[str]:
    """Yield parameters inside a region without a style: nobody would sum their gradients."""
    regions = [name for name, _, style in table.styled if style.is_region]
    styled = {name for name, _, _ in table.styled} - set(regions)
    for name in table.names:
        owner = name.rpartition(".")[0]
        outer = next((region for region in regions if owner == region or owner.startswith(region + ".")), None)
        if outer is None or table.covers(name):
            continue
        if not any(owner == path or owner.startswith(path + ".") for path in styled):
            yield (
                f"{name} {tuple(module.get_parameter(name).shape)} in region {outer} has no style, so its gradient "
                f"would be incomplete; give {name!r} 'grad_sum' where each rank's heads use it whole, 'per_head' where "
                "its first dim counts heads or features, None where it meets whole features"
            )
