// Prints the plan of a backward (sm80/backward/plan.h) for a call, a device and a unit given as words `name=number`.
#include <cstdlib>
#include <cstring>

#include "sm80/backward/plan.h"

namespace {

int words;
char** all_words;

int64_t number(const char* name, int64_t otherwise) {
  const size_t length = std::strlen(name);
  for (int i = 1; i < words; ++i) {
    if (std::strncmp(all_words[i], name, length) == 0 && all_words[i][length] == '=') {
      return std::atoll(all_words[i] + length + 1);
    }
  }
  return otherwise;
}

// An address that nobody reads, null where the word says 0.
template <typename T>
void point(T*& pointer, const char* name, int64_t otherwise) {
  pointer = reinterpret_cast<T*>(number(name, otherwise) * 256);
}

// Contiguous [B, N, L, H, channels].
void set_strides(int64_t (&stride)[4], const ds4s::BwdParams& p, int64_t L, int64_t channels) {
  stride[3] = channels, stride[2] = p.H * channels, stride[1] = L * stride[2];
  stride[1] += number("gap", 0), stride[0] = p.N * stride[1];
}

ds4s::BwdParams call() {
  ds4s::BwdParams p{};
  p.B = number("B", 1), p.N = number("N", 1), p.Lq = number("Lq", 1), p.Lk = number("Lk", 1), p.H = number("H", 1);
  p.D = p.Dv = number("D", 32);
  point(p.bias1, "bias1", 1), point(p.bias2, "bias2", 1), point(p.row_mask, "row_mask", 0);
  point(p.dq, "dq", 1), point(p.dk, "dk", 1), point(p.dv, "dv", 1);
  point(p.dbias1, "dbias1", 0), point(p.dbias2, "dbias2", 1);
  set_strides(p.dq_stride, p, p.Lq, p.D), set_strides(p.dk_stride, p, p.Lk, p.D),
      set_strides(p.dv_stride, p, p.Lk, p.Dv);
  if (number("dv_gap", 0)) p.dv_stride[1] += 8, p.dv_stride[0] += p.N * 8;
  p.dk_stride[0] += number("batch_gap", 0);
  p.bias1_stride[0] = p.N * p.Lk, p.bias1_stride[1] = p.Lk, p.bias1_stride[2] = number("bias1_step", 1);
  p.bias2_stride[3] = 1, p.bias2_stride[2] = number("bias2_row", p.Lk), p.bias2_stride[1] = p.Lq * p.Lk;
  p.bias2_stride[0] = p.H * p.bias2_stride[1];
  if (number("one_bias2", 0)) p.bias2_stride[0] = p.bias2_stride[1] = 0;
  p.deterministic = int32_t(number("deterministic", 0)), p.partial_keys = int32_t(number("partial_keys", 0));
  return p;
}

// D = 32 or 64 in 16 bits, as they are compiled for 9.0, or without the fused kernel; D = 128 in float.
ds4s::BackwardUnit unit(int head_dim, bool has_fused, int max_stages) {
  ds4s::BackwardUnit unit{};
  const bool is_exact = head_dim == 128;
  unit.element_bytes = is_exact ? 4 : 2, unit.head_dim = head_dim, unit.has_bias2 = number("bias2", 1) != 0;
  unit.tiles_bias2 = !is_exact;
  unit.is_exact = unit.splits_dkdv = is_exact, unit.max_stages = max_stages;
  unit.tiles = ds4s::backward_tiles(head_dim * unit.element_bytes, unit.element_bytes, max_stages == 2);
  unit.dq_shared_bytes = is_exact ? 103168 : head_dim == 64 ? 57856 : 47104;
  unit.dk_shared_bytes = is_exact ? 103168 : head_dim == 64 ? 77824 : 47104;
  unit.dv_shared_bytes = is_exact ? 86144 : head_dim == 64 ? 39936 : 47104;
  unit.dbias2_shared_bytes = is_exact ? 137728 : head_dim == 64 ? 156672 : 91136;
  unit.dbias2_blocks = is_exact ? 8 : 1;
  unit.has_fused = has_fused && !is_exact;
  unit.fused_reads_bias2 = head_dim < 64, unit.fused_shared_bytes = head_dim == 64 ? 110624 : 96392;
  unit.fused_blocks = 2;
  return unit;
}

}  // namespace

int main(int argc, char** argv) {
  words = argc, all_words = argv;
  const ds4s::BwdParams p = call();
  ds4s::DeviceFacts device;
  device.num_multiprocessors = int(number("multiprocessors", 132));
  device.shared_bytes_per_block = int(number("block_bytes", 227 << 10));
  device.shared_bytes_per_multiprocessor = int(number("multiprocessor_bytes", 228 << 10));
  const ds4s::Sm80BackwardPlan plan =
      ds4s::make_plan(p, device, unit(int(p.D), number("fused", 1) != 0, int(number("stages", 2))));
  char text[1024];
  ds4s::PlanText printed(text, sizeof(text));
  plan.print(printed);
  std::printf("%s\n", text);
  // A text for which there is no room is cut, never written past its end.
  char few[8] = "1234567";
  ds4s::PlanText cut(few, 4);
  plan.print(cut);
  return cut.length() == printed.length() && few[3] == '\0' && few[4] == '5' ? 0 : 1;
}
