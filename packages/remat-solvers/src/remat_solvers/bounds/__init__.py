"""Lower bounds for all schedules.

`least`, `bottleneck` and `regression` bound every peak from below, without a program; `keeping`
bounds times by what fits between the halves; `exhaust` solves graphs of a dozen ops exactly.
"""
