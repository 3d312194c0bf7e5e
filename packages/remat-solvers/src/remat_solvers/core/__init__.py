"""What every solver is built of.

`problem` is what a solver is given and may say; `wiring` is a graph as arrays, `trace` what a
sequence of computations holds, `dead_runs` leaves out of it what nothing needs. `rows` and `milp`
write and solve integer programs, `background` waits for them; `incumbent` keeps what a solve has
found and proved, `attempt` takes its steps, `parallel` runs sub-problems on any executor.
"""
