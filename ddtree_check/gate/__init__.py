"""The nightly gate: a matrix of runs, each in a process of its own, against a frozen baseline and earlier nights."""
