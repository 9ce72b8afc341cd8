"""From compile jobs to loaded kernels: threads that compile, threads that wait, and the display."""
