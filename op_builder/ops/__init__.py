"""The ops: their kernels, the devices they serve, and their state on this machine."""
