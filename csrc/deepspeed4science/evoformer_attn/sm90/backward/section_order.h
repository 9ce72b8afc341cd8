// The order in which sections of the queries get accumulators of dq (dq_global.h), where rows n are paired. Clusters
// take the couples of (b, n, h), `tiles` of keys each, in waves. A couple's sections come `shift` couples apart, which
// begin meanwhile:
//
//   couple        0        1        2        3     ...        shift = 2
//   sections      0.0      1.0      2.0 0.1  3.0 1.1  ...      (couple.section)
//
// All sections of a couple come before those of a couple whose keys the same cluster takes later
// (docs/kernels/dq-accumulators.md, H5).
#pragma once

namespace ds4s::sm90 {

class SectionOrder {
 public:
  constexpr SectionOrder(int num_couples, int tiles, int clusters, int num_sections)
      : couples_(num_couples), sections_(num_sections), shift_(clusters / tiles / num_sections) {}

  // The position of a section of one of a couple's two (b, n, h).
  constexpr int position(int couple, int section, int of_couple) const {
    const int column = couple + shift_ * section;
    int before = 0;
    for (int s = 0; s < sections_; ++s) {
      const int other = column - shift_ * s;  // whose section s is in this column
      const bool exists = other >= 0 && other < couples_;
      before += other < 0 ? 0 : other < couples_ ? other : couples_;
      before += exists && (shift_ > 0 ? s > section : s < section);  // earlier couples first
    }
    return 2 * before + of_couple;
  }

 private:
  int couples_, sections_, shift_;
};

}  // namespace ds4s::sm90
