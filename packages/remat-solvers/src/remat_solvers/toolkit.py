"""What a solver is built of, in one place, for the solvers of others.

- `Wiring.of(graph)` is a graph as arrays, in which ops and values are numbers; a *sequence* is an
  array of op numbers in the order in which they are computed.
- `trace(wiring, sequence)` is what the sequence holds at each time step, with `peak_bytes`;
  `sequence_time` what it takes, `expand` the schedule that it stands for, which frees each value
  after its last use, and `sequence_of` the way back.
- `in_order` reads a given schedule, such as a problem's `start`, as a sequence in the order of the
  graph; `None` if it is in another.
- `Incumbent` keeps the fastest sequence that fits and the bound on all, reports them, and makes
  the `Solution`. `prove` takes a bound that you proved, `raise_bound` and `refuse` what a back end
  did: it is believed until a schedule proves it wrong. `Attempt` is one with a deadline and the
  first steps of a solve; `starts` are schedules to begin with.
- `evict` and `evict_in_one_pass` bring a sequence within a budget, each in other ways by an
  `EvictionPerturbation` or a `OnePassPerturbation`; `prune` takes out what it does not need,
  `local_search` improves one that fits, `minimal_peak_trace` looks for the minimal peak.
- `peak_bound` and `bottleneck` prove what no schedule goes below in bytes (a `PeakBound`),
  `least_time` in time.
- `Program` and `solve_program` are integer programs, of which an `Answer` with its `Outcome`
  comes; `HIGHS` is the back end that is always there, and `doubt_of` says why one is not believed.
- `run_all` runs tasks on an executor.
"""

from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.peak import PeakBound, peak_bound
from remat_solvers.core.alternatives import least_time
from remat_solvers.core.attempt import Attempt
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.milp import HIGHS, Answer, Outcome, Program, solve_program
from remat_solvers.core.parallel import run_all
from remat_solvers.core.problem import Limit, Problem, Progress, Report, Solver
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.trust import doubt_of
from remat_solvers.core.wiring import Floats, Ints, Wiring, expand, in_order, sequence_of
from remat_solvers.search.descent import minimal_peak_trace
from remat_solvers.search.evict import evict
from remat_solvers.search.local_search import local_search
from remat_solvers.search.one_pass import evict_in_one_pass
from remat_solvers.search.perturbations import EvictionPerturbation, OnePassPerturbation
from remat_solvers.search.prune import prune
from remat_solvers.search.starts import starts

__all__ = [
    "HIGHS",
    "Answer",
    "Attempt",
    "EvictionPerturbation",
    "Floats",
    "Incumbent",
    "Ints",
    "Limit",
    "OnePassPerturbation",
    "Outcome",
    "PeakBound",
    "Problem",
    "Program",
    "Progress",
    "Report",
    "Solver",
    "Trace",
    "Wiring",
    "bottleneck",
    "doubt_of",
    "evict",
    "evict_in_one_pass",
    "expand",
    "in_order",
    "least_time",
    "local_search",
    "minimal_peak_trace",
    "peak_bound",
    "prune",
    "run_all",
    "sequence_of",
    "sequence_time",
    "solve_program",
    "starts",
    "trace",
]
