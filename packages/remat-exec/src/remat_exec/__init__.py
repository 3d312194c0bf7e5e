"""Execution of re-materialization schedules in PyTorch, and measurement of their peak memory."""
