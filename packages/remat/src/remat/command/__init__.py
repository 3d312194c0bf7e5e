"""The `remat` command.

Exit codes: 0 if it did what was asked; 1 if something given is wrong, or cannot be read or written;
2 if the command line is; 3 if no schedule within the budget was found; 130 if Ctrl-C came before
there was one.
"""

from remat.command import about, cache, curves, graphs, models, reports
from remat.command.main import app, main

__all__ = ["about", "app", "cache", "curves", "graphs", "main", "models", "reports"]
