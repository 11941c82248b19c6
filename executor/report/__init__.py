"""The report: one page on a plan, its prediction and its measurement."""
