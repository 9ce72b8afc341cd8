"""Compilers, headers, processors and GPUs of this machine, and what they can do."""
