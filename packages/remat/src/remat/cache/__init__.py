"""What was solved and measured before, kept between processes.

`REMAT_CACHE` is a folder, or `0` for no cache; without it, it is the user's cache folder. An entry
is data: it is compared with the key that it is looked for by, a solution passes the simulator, and
neither names nor anything else of an entry reaches generated code or a path.
"""

from remat.cache.costs import remembered_costs
from remat.cache.peaks import remembered_peak, remembered_rehearsal
from remat.cache.shared import shared_solution
from remat.cache.smallest import keep_smallest, smallest_known
from remat.cache.solutions import cached_solution, keep_solution
from remat.cache.store import Entry, Store

__all__ = [
    "Entry",
    "Store",
    "cached_solution",
    "keep_smallest",
    "keep_solution",
    "remembered_costs",
    "remembered_peak",
    "remembered_rehearsal",
    "shared_solution",
    "smallest_known",
]
