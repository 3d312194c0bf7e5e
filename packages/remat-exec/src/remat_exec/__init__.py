"""Execution of re-materialization schedules in PyTorch, and the measurement of their peak memory."""
