// The forward's TMA tensor maps.
#pragma once

#include "sm90/mma/tensor_map.h"

namespace ds4s::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v, o, bias2;
};

}  // namespace ds4s::sm90
