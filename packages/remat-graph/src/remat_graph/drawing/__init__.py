"""Pictures of hierarchies.

`picture` says what is shown, `dot` and `svg` write it; `layout` places what `svg` draws.
"""

from remat_graph.drawing.dot import to_dot
from remat_graph.drawing.svg import to_svg

__all__ = ["to_dot", "to_svg"]
