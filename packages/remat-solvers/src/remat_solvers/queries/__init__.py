"""Questions that many solves answer.

`tradeoff` is the curve of time against peak, `curve` what is known along it, `batch` the largest
batch within a budget.
"""
