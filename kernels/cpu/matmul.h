// Products with tiled weights: what the lowerings for each instruction set are given. The layout is that of `kernels.tiled_array`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diptych {

constexpr int kRows = 16;   // of a tile: outputs that are computed at once
constexpr int kBlock = 32;  // inputs that share a scale of rounded activations
constexpr int kChunk = 4;   // inputs whose products one instruction adds up

enum class Code : int32_t { kU4 = 4, kU8 = 8, kU5 = 41, kU6 = 42, kF4 = 40 };
enum class Number : int32_t { kNone, kF16, kBF16, kF32, kU8, kS8, kExponent };

constexpr int64_t PlaneBytes(Code code, int plane) {  // of a tile's block; 0: there is no such plane, or no such code
  switch (code) {
    case Code::kU4:
    case Code::kF4: return plane == 0 ? 256 : 0;
    case Code::kU8: return plane == 0 ? 512 : 0;
    case Code::kU5: return plane == 0 ? 256 : 64;
    case Code::kU6: return plane == 0 ? 256 : 128;
  }
  return 0;
}

constexpr int64_t NumberBytes(Number number) {
  switch (number) {
    case Number::kF16:
    case Number::kBF16: return 2;
    case Number::kF32: return 4;
    case Number::kU8:
    case Number::kS8:
    case Number::kExponent: return 1;
    case Number::kNone: return 0;
  }
  return 0;
}

struct Values {  // one number per row of a tile and group: [tiles, groups, 16]
  const void* data = nullptr;
  Number number = Number::kNone;
};

struct Weights {
  Code code;
  int64_t outs, inputs;    // O and I
  int64_t groups, supers;  // of a row
  int32_t zero;
  const uint8_t* planes[2];
  Values scales, zeros, offsets, super_scales, super_offsets;

  int64_t tiles() const { return (outs + kRows - 1) / kRows; }
  int64_t blocks() const { return inputs / kBlock; }
};

// Activations [rows, inputs] as the products read them.
struct Rows {
  const float* given;
  const float* norm;  // [inputs]: they are normed first, x / sqrt(mean(x^2) + eps) * norm; or null
  float eps;
  const float* x;     // what is multiplied: `given`, or room for the normed ones
  int64_t count;
  int bits;             // 0: as they are; else they are rounded, with a scale for each block: 15: to 15 bits; 8: to 8, and outliers' blocks to 15
  int8_t* codes;        // [count, inputs]: of 8 bits, or the upper 8 of 15, in steps of the scale
  int8_t* low;          // [count, inputs]: what is left of 15, -64 to 63, in steps of a 128th of it
  uint8_t* wide;        // [count, blocks]: whether any of `low` is not 0
  float* scales;        // [count, blocks]
  bool halves;          // groups of weights are half a block
  int32_t zero;         // the code of weights that stands for 0
  int32_t* starts;      // [count, blocks] or with halves [count, blocks, 2]: -zero times the sum of `codes`
  int32_t* low_starts;  // likewise, of `low`
  float* shifts;        // likewise: the sum of the rounded numbers, which an offset is multiplied with
};

// Memory of this thread's own, which stays for its next call with the same use; aligned to 64 bytes. Not a template of the standard
// library: one that is instantiated where a newer instruction set is allowed would serve all callers.
enum class Use { kRows, kTile, kScores, kPairs, kPartial, kGroups, kCount };
void* Scratch(Use use, size_t bytes);

enum class Gate : int32_t { kNone, kSilu, kGelu };

// What becomes of products [rows, outs]: they are stored; added to a `residual` of the same shape; or, the first half of them being gates, the
// second half is multiplied by these, and [rows, outs / 2] stored.
struct Products {
  float* out;
  const float* residual;
  Gate gate;
};

// Of matrices that lie one after another, the one `index` after this one.
inline Weights MatrixAt(Weights w, int64_t index) {
  for (int plane = 0; plane < 2; ++plane) {
    if (w.planes[plane]) w.planes[plane] += index * w.tiles() * w.blocks() * PlaneBytes(w.code, plane);
  }
  const auto move = [&](Values* values, int64_t groups) {
    if (values->data) values->data = static_cast<const char*>(values->data) + index * w.tiles() * groups * kRows * NumberBytes(values->number);
  };
  move(&w.scales, w.groups);
  move(&w.zeros, w.groups);
  move(&w.offsets, w.groups);
  move(&w.super_scales, w.supers);
  move(&w.super_offsets, w.supers);
  return w;
}

// `count` of the rows, which are prepared, from number `first` on.
inline Rows RowsFrom(Rows rows, int64_t inputs, int64_t first, int64_t count) {
  rows.count = count;
  rows.x += first * inputs;
  if (!rows.bits) return rows;
  const int64_t blocks = inputs / kBlock, parts = rows.halves ? 2 * blocks : blocks;
  rows.codes += first * inputs;
  rows.low += first * inputs;
  rows.scales += first * blocks;
  rows.wide += first * blocks;
  rows.starts += first * parts;
  rows.low_starts += first * parts;
  rows.shifts += first * parts;
  return rows;
}

// What becomes of the rows from number `first` on, each of `width` numbers.
inline Products ProductsFrom(Products products, int64_t width, int64_t first) {
  products.out += first * width;
  if (products.residual) products.residual += first * width;
  return products;
}

using RoundRows = void (*)(const Rows&, int64_t inputs, int64_t first, int64_t last);
using MultiplyTiles = void (*)(const Weights&, const Rows&, const Products&, int64_t first, int64_t last);

struct MatmulKernels {
  RoundRows prepare;       // rows [first, last): norms them, fills codes, scales and sums
  MultiplyTiles multiply;  // tiles [first, last), of gates only where there are such
};

extern const MatmulKernels kMatmulAvx2, kMatmulAvx512;

}  // namespace diptych
