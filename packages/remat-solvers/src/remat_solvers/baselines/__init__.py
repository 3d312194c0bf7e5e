"""The baselines of the Checkmate paper: what to keep by a rule, then the least recomputation.

`forward` looks at the forward half, `segments` turns checkpoints into what is kept at each stage,
`sweep` schedules proposals and keeps the fastest that fits, `checkpoints` puts these together;
each solver has a file of its own.
"""
