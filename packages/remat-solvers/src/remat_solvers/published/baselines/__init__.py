"""What others are measured against: XLA's rule, Gist, and Checkmate's baselines.

The baselines of the Checkmate paper keep values by a rule and then recompute the least they must:
`forward` looks at the forward half, `segments` turns checkpoints into what is kept at each stage,
`sweep` schedules proposals and keeps the fastest that fits; `checkpoints`, `griewank` and
`last_node` are solvers made of these.
"""
