"""Optimizers: the table of rules, their coefficients, the kernels that take steps, and schedules. Pure."""
