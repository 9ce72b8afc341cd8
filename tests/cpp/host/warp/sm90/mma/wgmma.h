// In place of sm90/mma/wgmma.h on the host.
#pragma once

namespace ds4s::sm90 {

constexpr int row_of(int index) { return index >> 1 & 1; }

}  // namespace ds4s::sm90
