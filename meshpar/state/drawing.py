"""A mesh as text and as SVG (which rank sits where, each axis' groups and links), and tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from meshpar.core.errors import MeshError
from meshpar.core.mesh import MeshSpec

_CELL, _ROW, _LABEL, _TOP = 44, 40, 66, 34
_MOST_NODES, _MOST_GROUPS = 8, 6
_CROSSES = "#b5544d"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]


def mesh_text(spec: MeshSpec, ranks_per_node: int) -> str:
    """Return the drawing of a resolved mesh as text; raises MeshError where the nodes are not all full."""
    nodes = _nodes(spec, ranks_per_node)
    lines = [f"{spec}: {spec.size} ranks on {nodes} node{'s' if nodes > 1 else ''} of {ranks_per_node}", ""]
    cell, first = len(str(spec.size - 1)) + 1, max(map(len, ("rank", *spec.axes)))
    for node in range(min(nodes, _MOST_NODES)):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        lines.append(f"node {node}  {'rank'.ljust(first)} {''.join(str(rank).rjust(cell) for rank in ranks)}")
        for axis in spec.axes:
            places = "".join(str(spec.coordinates(rank)[axis]).rjust(cell) for rank in ranks)
            lines.append(f"        {axis.ljust(first)} {places}")
        lines.append("")
    if nodes > _MOST_NODES:
        lines += [f"... and {nodes - _MOST_NODES} nodes more", ""]
    width = max(len(f"{axis}={size}") for axis, size in spec.axes.items())
    for axis, size in spec.axes.items():
        groups = spec.groups(axis)
        shown = "  ".join("{" + _members(group) + "}" for group in groups[:_MOST_GROUPS])
        more = f"  ... {len(groups) - _MOST_GROUPS} more" if len(groups) > _MOST_GROUPS else ""
        lines.append(f"{f'{axis}={size}'.ljust(width)}  {_where(spec, axis, ranks_per_node)}")
        lines.append(f"{' ' * width}  {shown}{more}")
    return "\n".join(lines)


def mesh_svg(spec: MeshSpec, ranks_per_node: int) -> str:
    """Return the drawing as one SVG, a panel for each axis; raises MeshError where the nodes are not all full."""
    nodes = min(_nodes(spec, ranks_per_node), _MOST_NODES)
    width = _LABEL + _CELL * ranks_per_node
    height = _TOP + _ROW * nodes + 14
    axes = [axis for axis, size in spec.axes.items() if size > 1] or list(spec.axes)
    panels = ""
    for number, axis in enumerate(axes):
        panel = "".join(_panel(spec, axis, ranks_per_node, nodes, width))
        panels += f'<g transform="translate(0 {number * height})">{panel}</g>'
    size = f'viewBox="0 0 {max(width, 520)} {height * len(axes)}" width="{max(width, 520)}"'
    style = 'font-family="system-ui,sans-serif" font-size="12" fill="#1d2a35"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><title>{escape(str(spec))}</title>{panels}</svg>'


def _nodes(spec: MeshSpec, ranks_per_node: int) -> int:
    if spec.size % ranks_per_node:
        raise MeshError(
            f"{spec.size} ranks do not fill nodes of {ranks_per_node}; give a number of nodes that divides them"
        )
    return spec.size // ranks_per_node


def _members(group: tuple[int, ...]) -> str:
    return " ".join(map(str, group)) if len(group) <= 8 else f"{' '.join(map(str, group[:7]))} ... {group[-1]}"


def _where(spec: MeshSpec, axis: str, per_node: int) -> str:
    groups = spec.groups(axis)
    spans = [len({rank // per_node for rank in group}) for group in groups]
    count = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {spec.axes[axis]}"
    if spec.axes[axis] == 1:
        return f"{count}: no communication"
    if max(spans) == 1:
        return f"{count}; each stays inside one node"
    crossing = "each crosses" if min(spans) > 1 else f"{sum(span > 1 for span in spans)} of them cross"
    return f"{count}; {crossing} the network between {max(spans)} nodes"


def _panel(spec: MeshSpec, axis: str, per_node: int, nodes: int, width: int) -> Iterator[str]:
    """Yield the parts of one axis' panel."""
    where = escape(_where(spec, axis, per_node))
    yield f'<text x="0" y="16"><tspan font-weight="600">{axis}={spec.axes[axis]}</tspan>: {where}</text>'
    for node in range(nodes):
        y = _TOP + node * _ROW
        yield f'<text x="0" y="{y + 18}" fill="#5b6b78">node {node}</text>'
        size = f'x="{_LABEL - 6}" y="{y - 6}" width="{width - _LABEL + 4}" height="{_ROW - 4}" rx="6"'
        yield f'<rect {size} fill="none" stroke="#c9d3db"/>'
    groups = spec.groups(axis)
    shown = nodes * per_node
    for number, group in enumerate(groups):
        ranks = [rank for rank in group if rank < shown]
        crosses = len({rank // per_node for rank in group}) > 1
        # Inside a node the colour alone joins ranks that are no neighbours: lines would run through the others.
        if len(ranks) > 1 and (crosses or ranks[1] == ranks[0] + 1):
            corners = (_place(rank, per_node) for rank in ranks)
            points = " ".join(f"{x + _CELL / 2 - 4:.0f},{y + 12:.0f}" for x, y in corners)
            look = f'stroke="{_colour(number, len(groups))}" stroke-width="3"'
            look = f'stroke="{_CROSSES}" stroke-dasharray="4 3"' if crosses else look
            yield f'<polyline points="{points}" fill="none" {look}/>'
    for number, group in enumerate(groups):
        for rank in (member for member in group if member < shown):
            x, y = _place(rank, per_node)
            yield f'<rect x="{x}" y="{y}" width="{_CELL - 8}" height="24" rx="4" fill="{_colour(number, len(groups))}">'
            yield f"<title>{escape(f'rank {rank}: {spec.coordinates(rank)}')}</title></rect>"
            where = f'x="{x + _CELL / 2 - 4:.0f}" y="{y + 16}" text-anchor="middle"'
            yield f'<text {where} fill="#fff" style="fill:#fff">{rank}</text>'


def _place(rank: int, per_node: int) -> tuple[int, int]:
    return _LABEL + rank % per_node * _CELL, _TOP + rank // per_node * _ROW


def _colour(place: int, groups: int) -> str:
    return f"hsl({(205 + place * 360 / max(groups, 2)) % 360:.0f} 42% {46 + 8 * (place % 2)}%)"
