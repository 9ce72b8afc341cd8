// In place of sm90/mma/pipeline.h on the host.
#pragma once

namespace ds4s::sm90 {

struct ConsumerCoord {
  int tile, warp, lane;
};

}  // namespace ds4s::sm90
