// In place of the epilogue on the host: what sm80/forward/softmax.h names, and this test does not call.
#pragma once

namespace ds4s {
template <typename, typename, int, typename, typename, bool, bool, typename>
struct MemoryEfficientAttentionNormalize;
}
