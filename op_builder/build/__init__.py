"""From compile jobs to loaded kernels: who compiles what, when, and what a person sees of it."""
