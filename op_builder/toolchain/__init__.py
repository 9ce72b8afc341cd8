"""Compilers, headers, processors and GPUs of this machine: what is there, and what it can do."""
