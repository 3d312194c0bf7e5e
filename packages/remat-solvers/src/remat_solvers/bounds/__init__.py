"""Lower bounds for all schedules, proved without a program.

`least`, `bottleneck` and `regression` bound every peak from below; `exhaust` solves graphs of a
dozen ops exactly.
"""
