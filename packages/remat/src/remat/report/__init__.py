"""What a plan does, told: by module and source line, as a page, as traces of other tools.

`lifetimes` says when which buffer is held and `explaining` why; both need a graph and a schedule
and nothing else. `page`, `figures` and `traces` write files of it.
"""
