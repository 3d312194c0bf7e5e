"""Pictures of hierarchies, and of what schedules hold.

`picture` says what is shown, `dot` and `svg` write it; `layout` places what `svg` draws. `memory`
draws what is held over time.
"""

from remat_graph.drawing.dot import to_dot
from remat_graph.drawing.memory import memory_to_svg
from remat_graph.drawing.picture import printable
from remat_graph.drawing.svg import to_svg

__all__ = ["memory_to_svg", "printable", "to_dot", "to_svg"]
