"""Speed, memory and start-up measurements of the op beside its peers. `python -m benchmarks
--help`.
"""
