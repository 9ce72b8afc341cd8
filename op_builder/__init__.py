"""How C++ and CUDA become loaded libraries."""
