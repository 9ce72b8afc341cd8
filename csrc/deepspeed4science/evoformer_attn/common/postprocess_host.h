// Host side of common/postprocess.h.
#pragma once

#include <atomic>

#include "common/device_facts.h"
#include "common/key_mask_buffers.h"
#include "common/postprocess.h"

namespace ds4s {

// The flag of a call, in a word of its workspace.
inline PostprocessFlag new_postprocess_flag(uint32_t* word) {
  static std::atomic<uint32_t> calls{0x64733473u};
  return {word, calls.fetch_add(1, std::memory_order_relaxed)};
}

// Without a bias all queries of a row n see all of its keys, and there are several (deepspeed4science/prepared.py
// handles Lk = 1).
inline bool needs_postprocess(const BwdParams& p) { return p.bias1 != nullptr || p.bias2 != nullptr; }

// One wave; results do not depend on the number.
inline int64_t num_postprocess_blocks(const DeviceFacts& device) {
  return int64_t(kPostprocessBlocks) * device.num_multiprocessors;
}

// key_mask: the result of find_visible_keys, or null.
inline PostprocessArgs postprocess_args(const BwdParams& p, void* key_mask, PostprocessFlag flag) {
  const KeyMaskBuffers<BwdParams> buffers(p);
  PostprocessArgs args{};
  args.p = p, args.flag = flag, args.dbias2_stride = p.Lk;
  args.shift = buffers.at(key_mask).shift;
  args.only_key = buffers.only_key(key_mask);
  return args;
}

}  // namespace ds4s
