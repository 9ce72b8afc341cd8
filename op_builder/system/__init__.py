"""Files, ownership, the end of a process, warnings: helpers that know nothing about kernels."""
