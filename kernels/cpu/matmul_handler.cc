// Products with tiled weights, as XLA calls them.
#include <algorithm>
#include <string>

#include "handlers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace diptych {
namespace {

bool ToNumber(ffi::DataType type, Number* number) {
  switch (type) {
    case ffi::DataType::F16: *number = Number::kF16; return true;
    case ffi::DataType::BF16: *number = Number::kBF16; return true;
    case ffi::DataType::F32: *number = Number::kF32; return true;
    case ffi::DataType::U8: *number = Number::kU8; return true;
    case ffi::DataType::S8: *number = Number::kS8; return true;
    case ffi::DataType::F8E8M0FNU: *number = Number::kExponent; return true;
    default: return false;
  }
}

// x f32 [rows, I] times tiled weights: f32 [rows, O]. `present`: which of zeros, offsets, super_scales and super_offsets follow the scales,
// then a norm [I] and a residual [rows, O], a bit each. `bits`: those that x is rounded to, by blocks of 32: 8 or 15, or 0: not. With a
// `gate` (see `Gate`) the result is [rows, O / 2].
ffi::Error Matmul(ffi::ThreadPool pool, int32_t code, int32_t zero, int32_t present, int32_t bits, int32_t gate, float eps,
                  ffi::Buffer<ffi::F32> x, ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> out) {
  if (x.dimensions().size() != 2 || out->dimensions().size() != 2) return Wrong("matmul takes and gives two axes");
  Weights w{};
  w.code = static_cast<Code>(code);
  w.zero = zero;
  w.inputs = x.dimensions()[1];
  w.outs = out->dimensions()[1] * (gate ? 2 : 1);
  if (gate < 0 || gate > 2 || (gate && out->dimensions()[1] % kRows)) return Wrong("gates must be whole tiles");
  if (out->dimensions()[0] != x.dimensions()[0]) return Wrong("matmul gives as many rows as it takes");
  if (w.outs <= 0) return Wrong("there are no outputs");
  if (w.inputs <= 0) return Wrong("there are no inputs");
  if (w.inputs % kBlock) return Wrong("inputs must be a multiple of 32");
  const bool two = w.code == Code::kU5 || w.code == Code::kU6;
  static const int64_t kBytes[][3] = {{4, 256, 0}, {8, 512, 0}, {41, 256, 64}, {42, 256, 128}, {40, 256, 0}};
  const int64_t* bytes = nullptr;
  for (const auto& each : kBytes) bytes = each[0] == code ? each : bytes;
  if (bytes == nullptr) return Wrong("code " + std::to_string(code) + " is not known");
  size_t next = 0;
  const auto take = [&](int64_t* size) -> ffi::AnyBuffer {
    auto buffer = rest.get<ffi::AnyBuffer>(next++);
    *size = static_cast<int64_t>(buffer->element_count());
    return *buffer;
  };
  size_t wanted = (two ? 2 : 1) + 1;
  for (int bit = 0; bit < 6; ++bit) wanted += present >> bit & 1;
  if (rest.size() != wanted) return Wrong("matmul takes " + std::to_string(wanted) + " arrays of weights");
  int64_t size = 0;
  for (int plane = 0; plane < (two ? 2 : 1); ++plane) {
    const ffi::AnyBuffer buffer = take(&size);
    if (buffer.element_type() != ffi::DataType::U8) return Wrong("a plane's type is not uint8");
    w.planes[plane] = static_cast<const uint8_t*>(buffer.untyped_data());
    if (size != w.tiles() * w.blocks() * bytes[1 + plane]) return Wrong("a plane's size does not fit the shape");
  }
  const auto values = [&](Values* into, int64_t* groups) {
    const ffi::AnyBuffer buffer = take(&size);
    into->data = buffer.untyped_data();
    if (!ToNumber(buffer.element_type(), &into->number)) return false;
    const int64_t found = size / (w.tiles() * kRows);
    if (*groups == 0) *groups = found;
    return found == *groups && size == found * w.tiles() * kRows && found > 0;
  };
  bool fits = values(&w.scales, &w.groups);
  if (present & 1) fits = fits && values(&w.zeros, &w.groups);
  if (present & 2) fits = fits && values(&w.offsets, &w.groups);
  if (present & 4) fits = fits && values(&w.super_scales, &w.supers);
  if (present & 8) fits = fits && values(&w.super_offsets, &w.supers);
  if (!fits || w.inputs % w.groups || (w.inputs / w.groups) % (kBlock / 2) || (w.supers && w.groups % w.supers)) {
    return Wrong("scales do not fit the shape");
  }
  Rows rows{};
  Products products{out->typed_data(), nullptr, static_cast<Gate>(gate)};
  if (present & 16) {
    const ffi::AnyBuffer norm = take(&size);
    if (norm.element_type() != ffi::DataType::F32 || size != w.inputs) return Wrong("the norm does not fit the inputs");
    rows.norm = static_cast<const float*>(norm.untyped_data());
  }
  if (present & 32) {
    const ffi::AnyBuffer residual = take(&size);
    if (residual.element_type() != ffi::DataType::F32 || size != static_cast<int64_t>(out->element_count())) {
      return Wrong("the residual does not fit the result");
    }
    products.residual = static_cast<const float*>(residual.untyped_data());
  }
  const int64_t span = w.inputs / w.groups;
  if (span >= kBlock && span % kBlock) return Wrong("groups must be whole blocks");

  rows.given = rows.x = x.typed_data();
  rows.eps = eps;
  rows.count = x.dimensions()[0];
  if (bits != 0 && bits != 8 && bits != 15) return Wrong("activations are rounded to 8 bits or to 15");
  rows.bits = bits;
  rows.halves = span < kBlock;
  rows.zero = w.zero;
  const MatmulKernels& kernels = Matmuls();
  const int64_t numbers = rows.count * w.inputs, blocks = rows.bits ? rows.count * w.blocks() : 0;
  if (rows.bits || rows.norm) {
    const int64_t codes = bits == 0 ? 0 : bits == 8 ? numbers : 2 * numbers;
    auto* memory = static_cast<char*>(Scratch(Use::kRows, (rows.norm ? 4 * numbers : 0) + 20 * blocks + codes));
    if (rows.norm) {
      rows.x = reinterpret_cast<float*>(memory);
      memory += 4 * numbers;
    }
    rows.scales = reinterpret_cast<float*>(memory);
    rows.starts = reinterpret_cast<int32_t*>(memory + 4 * blocks);
    rows.shifts = reinterpret_cast<float*>(memory + 12 * blocks);
    rows.codes = reinterpret_cast<int8_t*>(memory + 20 * blocks);
    rows.low = rows.codes + (bits == 8 ? 0 : numbers);
    const int64_t piece = std::max<int64_t>(1, 16384 / w.inputs);
    Team::Run(pool, rows.count, piece, [&](int64_t first, int64_t last) { kernels.prepare(rows, w.inputs, first, last); });
  }
  // Pieces of about 64k weights times rows, eight to a thread at least; whole pairs of tiles, which are multiplied together.
  const int64_t tiles = gate ? w.tiles() / 2 : w.tiles(), work = kRows * w.inputs * std::max<int64_t>(1, rows.count / 4);
  const int64_t least = std::min(tiles / 16, 65536 / work), piece = gate ? std::max<int64_t>(1, least) : (std::max<int64_t>(1, least) + 1) / 2 * 2;
  Team::Run(pool, tiles, piece, [&](int64_t first, int64_t last) { kernels.multiply(w, rows, products, first, last); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace diptych

XLA_FFI_DEFINE_HANDLER_SYMBOL(DiptychMatmul, diptych::Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int32_t>("code")
                           .Attr<int32_t>("zero")
                           .Attr<int32_t>("present")
                           .Attr<int32_t>("bits")
                           .Attr<int32_t>("gate")
                           .Attr<float>("eps")
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>());
