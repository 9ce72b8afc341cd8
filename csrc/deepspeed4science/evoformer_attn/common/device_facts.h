// Properties of the device that a plan (sm80/backward/plan.h, sm90/backward/plan.h) may use. Plain data: a plan is then
// a function of values, and a host test plans for any device. common/device_query.h fills it. A family that needs more
// (how many blocks of a kernel are resident, clusters) derives a struct of its own from this one.
#pragma once

namespace ds4s {

struct DeviceFacts {
  int num_multiprocessors = 0;
  int shared_bytes_per_block = 0;           // the largest size that a kernel may request
  int shared_bytes_per_multiprocessor = 0;  // includes kReservedSharedBytes for each resident block
};

// The system reserves 1 KiB of shared memory for each block (CUDA C++ programming guide, compute capabilities 8.0 and
// above).
constexpr int kReservedSharedBytes = 1024;

}  // namespace ds4s
