"""What all parts use and what uses none of them: errors, logging, traces, random numbers, threads, native calls."""
