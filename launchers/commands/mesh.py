"""``meshpar mesh``: a drawing of a mesh on nodes."""

from __future__ import annotations

from pathlib import Path

from meshpar.drawing import mesh_svg, mesh_text
from meshpar.errors import MeshError
from meshpar.mesh import MeshSpec


def draw_mesh(text: str, nodes: int, svg: Path | None) -> str:
    """Return the drawing as text, and write it to ``svg`` if that is given.

    Raises:
        MeshError: the mesh cannot be read, a size is open, or its ranks do not fill the nodes.
    """
    spec = MeshSpec(text)
    if -1 in spec.axes.values():
        raise MeshError(f"mesh {spec} has an axis of size -1; give every size to draw it")
    if spec.size % nodes:
        raise MeshError(f"{spec.size} ranks do not divide evenly among {nodes} nodes; change the mesh or --nodes")
    drawn = mesh_text(spec, spec.size // nodes)
    if svg is not None:
        svg.write_text(mesh_svg(spec, spec.size // nodes), encoding="utf-8")
        drawn += f"\n\ndrawing: {svg}"
    return drawn
