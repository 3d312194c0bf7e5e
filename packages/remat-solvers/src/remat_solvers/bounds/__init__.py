"""Lower bounds for all schedules.

`peak`, `bottleneck` and `regression` bound every peak from below, without a program; `kept_bytes`
bounds times by what fits between the halves; `exhaustive` solves graphs of a dozen ops exactly.
"""
