"""Microbenchmarks of every task kind and collective, for calibrations."""
