"""``meshpar mesh``: a drawing of a mesh on nodes."""

from __future__ import annotations

from pathlib import Path

from meshpar.drawing import mesh_svg, mesh_text
from meshpar.errors import MeshError
from meshpar.mesh import MeshSpec


def draw_mesh(text: str, nodes: int, svg: Path | None) -> str:
    """Return the drawing as text, and write it as SVG where asked.

    Raises:
        MeshError: the mesh cannot be read, a size is open, or its ranks do not fill the nodes.
    """
    spec = MeshSpec(text)
    if -1 in spec.axes.values():
        raise MeshError(f"mesh {spec} leaves a size open; write it out to draw it")
    if spec.size % nodes:
        raise MeshError(f"{spec.size} ranks cannot be shared evenly by {nodes} nodes")
    drawn = mesh_text(spec, spec.size // nodes)
    if svg is not None:
        svg.write_text(mesh_svg(spec, spec.size // nodes), encoding="utf-8")
        drawn += f"\n\ndrawing: {svg}"
    return drawn
