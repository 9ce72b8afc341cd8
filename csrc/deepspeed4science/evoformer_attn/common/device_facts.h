// What a plan (sm80/backward/plan.h, sm90/backward/plan.h) may know of the device that it is for. Plain data, so that a
// plan is a function of values and a host test plans for any device; common/device_query.h fills it. A family that asks
// for more (blocks of a kernel that fit on the device, clusters) derives a struct of its own from this one.
#pragma once

namespace ds4s {

struct DeviceFacts {
  int num_multiprocessors = 0;
  int shared_bytes_per_block = 0;           // the most that a kernel may ask for
  int shared_bytes_per_multiprocessor = 0;  // of which the device keeps kReservedSharedBytes for each block
};

// CUDA C++ programming guide, compute capabilities 8.0 and above: 1 KiB of shared memory for each block is the
// system's.
constexpr int kReservedSharedBytes = 1024;

}  // namespace ds4s
