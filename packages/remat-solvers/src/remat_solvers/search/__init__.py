"""Schedules by search, without a program.

`evict` and `paging` bring a schedule within a budget, `prune` takes out what it does not need,
`replay` lowers a peak that is near the least, `local_search` improves a schedule that fits.
`smallest` and `starts` put them together: for the least budget, and for schedules to begin with.
"""
