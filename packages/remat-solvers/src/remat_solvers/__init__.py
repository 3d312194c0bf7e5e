"""Solvers for re-materialization: schedules under a memory budget, with certified bounds."""
