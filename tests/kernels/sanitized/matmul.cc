// Products with tiled weights: any code, groups and numbers of scales; activations as they are, normed, rounded; gates and residuals.
#include "matmul.h"

#include <cmath>
#include <cstring>

#include "fuzz.h"

namespace diptych::fuzz {

namespace {

// Finite numbers in one of the forms that scales come in, small enough for no sum to overflow.
std::vector<char> Numbers(Random& random, Number number, int64_t size) {
  std::vector<char> bytes;
  const auto put = [&](auto value) { bytes.insert(bytes.end(), reinterpret_cast<char*>(&value), reinterpret_cast<char*>(&value + 1)); };
  for (int64_t i = 0; i < size; ++i) {
    const int64_t bits = random.between(0, 65535);
    switch (number) {
      case Number::kF16:
      case Number::kBF16: put(static_cast<uint16_t>(bits & 0xBFFF)); break;  // below 2
      case Number::kF32: put(random.normal()); break;
      case Number::kExponent: put(static_cast<uint8_t>(bits % 140)); break;
      case Number::kU8:
      case Number::kS8: put(static_cast<uint8_t>(bits)); break;
      case Number::kNone: break;
    }
  }
  bytes.shrink_to_fit();
  return bytes;
}

}  // namespace

void FuzzMatmul(Random& random, bool avx512) {
  const MatmulKernels& kernels = avx512 ? kMatmulAvx512 : kMatmulAvx2;
  Weights w{};
  w.code = random.one_of({Code::kU4, Code::kU8, Code::kU5, Code::kU6, Code::kF4});
  Products products{};
  products.gate = random.one_of({Gate::kNone, Gate::kNone, Gate::kSilu, Gate::kGelu});
  const bool has_gate = products.gate != Gate::kNone;
  w.outs = has_gate ? 2 * kRows * random.between(1, 3) : random.between(1, 70);
  w.inputs = kBlock * random.between(1, 12);
  w.zero = static_cast<int32_t>(w.code == Code::kU8 ? 128 : w.code == Code::kF4 ? 12 : random.between(0, 32));
  std::vector<int64_t> spans = {kBlock / 2};
  for (int64_t span = kBlock; span <= w.inputs; span += kBlock) {
    if (w.inputs % span == 0) spans.push_back(span);
  }
  w.groups = w.inputs / spans[random.between(0, static_cast<int64_t>(spans.size()) - 1)];

  const auto number = [&] {
    return random.one_of({Number::kF16, Number::kBF16, Number::kF32, Number::kU8, Number::kS8, Number::kExponent});
  };
  std::vector<char> values[5];
  const auto fill = [&](Values* into, std::vector<char>& memory, Number form, int64_t groups) {
    memory = Numbers(random, form, w.tiles() * groups * kRows);
    *into = {memory.data(), form};
  };
  fill(&w.scales, values[0], number(), w.groups);
  if (random.chance(40)) fill(&w.zeros, values[1], random.one_of({Number::kU8, Number::kS8}), w.groups);
  if (random.chance(40)) fill(&w.offsets, values[2], number(), w.groups);
  if (random.chance(40)) {
    w.supers = 1;
    for (int64_t many : {8, 4, 2}) {
      if (w.groups % many == 0) w.supers = w.groups / many;
    }
    fill(&w.super_scales, values[3], number(), w.supers);
    if (w.offsets.data) fill(&w.super_offsets, values[4], number(), w.supers);
  }
  const auto byte = [&] { return random.between(0, 255); };
  const int64_t all = w.tiles() * w.blocks();
  const int64_t second = w.code == Code::kU5 ? 64 : w.code == Code::kU6 ? 128 : 0;
  const auto low = array<uint8_t>(all * (w.code == Code::kU8 ? 512 : 256), byte), high = array<uint8_t>(all * second, byte);
  w.planes[0] = low.data();
  w.planes[1] = second ? high.data() : nullptr;

  Rows rows{};
  rows.count = random.between(0, 40);
  rows.bits = random.one_of({0, 8, 15});
  const bool ordinary = random.chance(50), has_norm = random.chance(30);
  const auto x = array<float>(rows.count * w.inputs, [&] { return ordinary || random.chance(95) ? random.normal() : random.extreme(); });
  const int64_t blocks = rows.bits ? rows.count * w.blocks() : 0;
  const auto nothing = [] { return 0; };
  auto codes = array<int8_t>(blocks * kBlock, nothing), rest = codes;
  auto wide = array<uint8_t>(blocks, nothing);
  auto scales = array<float>(blocks, [] { return kUnwritten; });
  const int64_t parts = w.inputs / w.groups < kBlock ? 2 * blocks : blocks;
  auto starts = array<int32_t>(parts, nothing), low_starts = starts;
  auto shifts = array<float>(parts, [] { return kUnwritten; });
  const auto norm = array<float>(has_norm ? w.inputs : 0, [&] { return random.normal(); });
  auto normed = array<float>(has_norm ? x.size() : 0, [] { return kUnwritten; });
  rows.given = x.data(), rows.x = has_norm ? normed.data() : x.data(), rows.norm = has_norm ? norm.data() : nullptr, rows.eps = 1e-6f;
  rows.codes = codes.data(), rows.low = rest.data(), rows.wide = wide.data(), rows.scales = scales.data();
  rows.starts = starts.data(), rows.low_starts = low_starts.data(), rows.shifts = shifts.data();
  rows.halves = w.inputs / w.groups < kBlock, rows.zero = w.zero;
  Describe("code %d, %lld x %lld, %lld groups, %lld supers, scales %d, zeros %d, offsets %d, %lld rows, bits %d, ordinary %d, norm %d, gate %d",
           static_cast<int>(w.code), static_cast<long long>(w.outs), static_cast<long long>(w.inputs), static_cast<long long>(w.groups),
           static_cast<long long>(w.supers), static_cast<int>(w.scales.number), static_cast<int>(w.zeros.number),
           static_cast<int>(w.offsets.number), static_cast<long long>(rows.count), rows.bits, ordinary, has_norm, static_cast<int>(products.gate));

  if (rows.bits || rows.norm) {  // in two pieces, as threads do
    const int64_t cut = random.between(0, rows.count);
    kernels.prepare(rows, w.inputs, cut, rows.count);
    kernels.prepare(rows, w.inputs, 0, cut);
  }
  const int64_t outs = has_gate ? w.outs / 2 : w.outs, tiles = has_gate ? w.tiles() / 2 : w.tiles();
  const auto residual = array<float>(random.chance(30) ? rows.count * outs : 0, [&] { return random.normal(); });
  products.residual = residual.empty() ? nullptr : residual.data();
  auto at_once = array<float>(rows.count * outs, [] { return kUnwritten; }), in_pieces = at_once;
  products.out = at_once.data();
  kernels.multiply(w, rows, products, 0, tiles);
  const int64_t cut = random.between(0, tiles);
  products.out = in_pieces.data();
  kernels.multiply(w, rows, products, cut, tiles);
  kernels.multiply(w, rows, products, 0, cut);
  auto in_groups = array<float>(rows.count * outs, [] { return kUnwritten; });
  products.out = in_groups.data();
  const int64_t border = random.between(0, rows.count);  // rows of two experts
  kernels.multiply(w, RowsFrom(rows, w.inputs, border, rows.count - border), ProductsFrom(products, outs, border), 0, tiles);
  kernels.multiply(w, RowsFrom(rows, w.inputs, 0, border), products, 0, tiles);
  for (size_t i = 0; i < at_once.size(); ++i) {
    Check(std::memcmp(&at_once[i], &in_pieces[i], sizeof(float)) == 0 || (std::isnan(at_once[i]) && std::isnan(in_pieces[i])),
          "tiles do not depend on the pieces that they are computed in");
    Check(std::memcmp(&at_once[i], &in_groups[i], sizeof(float)) == 0 || (std::isnan(at_once[i]) && std::isnan(in_groups[i])),
          "rows do not depend on those beside them");
    Check(!ordinary || std::isfinite(at_once[i]), "ordinary numbers give numbers");
  }
}

}  // namespace diptych::fuzz
