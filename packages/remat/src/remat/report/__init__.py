"""Shows what a plan does: in words, by module and source line, as a page, as traces.

`shown` is the plan that users hold. `lifetimes` says when which buffer is held and `explaining`
why; both need a graph and a schedule and nothing else. `page`, `figures` and `traces` write files.
"""
