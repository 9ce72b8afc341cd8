"""Files, owners, the end of a process, warnings: what needs to know nothing of kernels."""
