// What the programs softmax and sm90_softmax have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

constexpr double kInf = std::numeric_limits<double>::infinity();

// A bias for each key: of a part of a row, a block or step of keys, a key of that.
struct Kind {
  const char* name;
  double (*bias)(int part, int block, int key);
};

inline double difference(double x, double reference) {
  if (std::isinf(reference) || std::isinf(x)) return x == reference ? 0 : kInf;
  const double error = std::fabs(x - reference) / std::max(1., std::fabs(reference));
  return error == error ? error : kInf;
}
