"""What generated translation units say: the exports of params.h around a kernel's functions."""

# CPU kernels allocate what they need themselves: their workspace is always 0 bytes.
CPU_UNIT = """\
// {name}: written by op_builder/ops/instantiations.py.
#include <cstring>

#include "{header}"
#include "params.h"

DS4S_EXPORT int ds4s_abi_version() {{ return DS4S_ABI_VERSION; }}
DS4S_EXPORT const char* ds4s_name() {{ return "{name}"; }}
DS4S_EXPORT int64_t ds4s_workspace_bytes(const ds4s::{params}*) {{ return 0; }}
DS4S_EXPORT int ds4s_run(const ds4s::{params}* params, void*) {{
  return {function}<{scalar}, {isa}>(*params);
}}
DS4S_EXPORT const char* ds4s_status_string(int status) {{ return std::strerror(status); }}
"""

CUDA_UNIT = """\
// {name}: written by op_builder/ops/instantiations.py.
{includes}

DS4S_EXPORT int ds4s_abi_version() {{ return DS4S_ABI_VERSION; }}
DS4S_EXPORT const char* ds4s_name() {{ return "{name}"; }}
DS4S_EXPORT int64_t ds4s_workspace_bytes(const ds4s::{params}* params) {{
  return {workspace_bytes}(*params);
}}
DS4S_EXPORT int ds4s_run(const ds4s::{params}* params, void* stream) {{
  cudaGetLastError();  // clears the last call's, which it has returned: launches ask for theirs
  return {run}(*params, static_cast<cudaStream_t>(stream));
}}
DS4S_EXPORT const char* ds4s_status_string(int status) {{
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}}
"""

# Of kernels that have a plan to show.
CUDA_PLAN = """\
DS4S_EXPORT int64_t ds4s_plan(const ds4s::{params}* params, char* text, int64_t size) {{
  ds4s::PlanText plan(text, size);
  {plan}(*params, plan);
  return plan.length();
}}
"""
