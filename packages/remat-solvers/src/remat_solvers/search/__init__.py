"""Schedules by search, without a program.

`evict` and `one_pass` bring a schedule within a budget, at prices that `perturbations` vary;
`prune` takes out what it does not need, `repair` is both, with or without alternatives:
`evict_with_alternatives` chooses among them, `selection` says where that begins,
`swap_alternatives` changes which run first, `unfolding` makes an ordinary graph of the result.
`replay` lowers a peak that is near the least, `local_search` improves a schedule that fits.
`descent` and `starts` put them together: for the minimal peak, and for schedules to begin with.
"""
