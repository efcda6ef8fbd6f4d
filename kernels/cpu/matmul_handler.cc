// Products with tiled weights, as XLA calls them.
#include <algorithm>
#include <string>

#include "handlers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace diptych {
namespace {

constexpr int64_t kOwnRows = 4;  // at most as many rows every thread prepares for itself: to hand them over takes longer

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

// Rows that meet one matrix.
struct Group {
  int64_t matrix, row, count;
};

// Groups of rows that follow one another, the first sizes[0] for matrix 0 and so on; none without rows. Returns how many groups there are.
int64_t Share(const int32_t* sizes, int64_t matrices, Group* groups) {
  int64_t next = 0, row = 0;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    if (sizes[matrix] == 0) continue;
    groups[next++] = {matrix, row, sizes[matrix]};
    row += sizes[matrix];
  }
  return next;
}

// x f32 [rows, I] times tiled weights: f32 [rows, O]. `present`: which of zeros, offsets, super_scales and super_offsets follow the scales,
// then a norm [I], a residual [rows, O] and sizes int32 [E], a bit each. `bits`: those that x is rounded to, by blocks of 32: 8 (15 those
// of outliers), 15, or 0: not. With a `gate` (see `Gate`) the result is [rows, O / 2]. With sizes the weights are E matrices, one after
// another, the first sizes[0] rows meet the first one and so on, and rows past the last one's give 0; a matrix without rows is not read.
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
  if (PlaneBytes(w.code, 0) == 0) return Wrong("code " + std::to_string(code) + " is not known");
  const int planes = PlaneBytes(w.code, 1) ? 2 : 1;
  size_t next = 0;
  int64_t size = 0;
  const auto take = [&]() -> ffi::AnyBuffer {
    auto buffer = rest.get<ffi::AnyBuffer>(next++);
    size = static_cast<int64_t>(buffer->element_count());
    return *buffer;
  };
  size_t wanted = planes + 1;
  for (int bit = 0; bit < 7; ++bit) wanted += present >> bit & 1;
  if (rest.size() != wanted) return Wrong("matmul takes " + std::to_string(wanted) + " arrays of weights");
  int64_t matrices = 1, held = x.dimensions()[0];  // held: rows that meet a matrix
  if (held > INT32_MAX) return Wrong("there are too many rows");
  const auto every = static_cast<int32_t>(held);
  const int32_t* sizes = &every;
  if (present & 64) {
    next = wanted - 1;
    const ffi::AnyBuffer buffer = take();
    next = 0;
    if (buffer.element_type() != ffi::DataType::S32 || size == 0) return Wrong("sizes are not int32, or none");
    matrices = size;
    sizes = static_cast<const int32_t*>(buffer.untyped_data());
    int64_t sum = 0;
    for (int64_t matrix = 0; matrix < matrices; ++matrix) {
      sum += sizes[matrix];
      if (sizes[matrix] < 0 || sum > held) return Wrong("sizes do not fit the rows");
    }
    held = sum;
  }
  for (int plane = 0; plane < planes; ++plane) {
    const ffi::AnyBuffer buffer = take();
    if (buffer.element_type() != ffi::DataType::U8) return Wrong("a plane's type is not uint8");
    w.planes[plane] = static_cast<const uint8_t*>(buffer.untyped_data());
    if (size != matrices * w.tiles() * w.blocks() * PlaneBytes(w.code, plane)) return Wrong("a plane's size does not fit the shape");
  }
  const auto values = [&](Values* into, int64_t* groups) {
    const ffi::AnyBuffer buffer = take();
    into->data = buffer.untyped_data();
    if (!ToNumber(buffer.element_type(), &into->number)) return false;
    const int64_t rows = matrices * w.tiles() * kRows, found = size / rows;
    if (*groups == 0) *groups = found;
    return found == *groups && size == found * rows && found > 0;
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
    const ffi::AnyBuffer norm = take();
    if (norm.element_type() != ffi::DataType::F32 || size != w.inputs) return Wrong("the norm does not fit the inputs");
    rows.norm = static_cast<const float*>(norm.untyped_data());
  }
  if (present & 32) {
    const ffi::AnyBuffer residual = take();
    if (residual.element_type() != ffi::DataType::F32 || size != static_cast<int64_t>(out->element_count())) {
      return Wrong("the residual does not fit the result");
    }
    products.residual = static_cast<const float*>(residual.untyped_data());
  }
  const int64_t span = w.inputs / w.groups;
  if (span >= kBlock && span % kBlock) return Wrong("groups must be whole blocks");

  rows.given = rows.x = x.typed_data();
  rows.eps = eps;
  rows.count = held;
  if (bits != 0 && bits != 8 && bits != 15) return Wrong("activations are rounded to 8 bits or to 15");
  rows.bits = bits;
  rows.halves = span < kBlock;
  rows.zero = w.zero;
  const MatmulKernels& kernels = Matmuls();
  const bool prepared = rows.bits || rows.norm, own = prepared && rows.count <= kOwnRows;
  const auto placed = [&] {  // in memory of this thread's
    const int64_t numbers = rows.count * w.inputs, blocks = bits == 0 ? 0 : rows.count * w.blocks(), parts = rows.halves ? 2 * blocks : blocks;
    const int64_t codes = bits == 0 ? 0 : 2 * numbers;
    auto* memory = static_cast<char*>(Scratch(Use::kRows, (rows.norm ? 4 * numbers : 0) + 5 * blocks + 12 * parts + codes));
    Rows there = rows;
    if (rows.norm) {
      there.x = reinterpret_cast<float*>(memory);
      memory += 4 * numbers;
    }
    there.scales = reinterpret_cast<float*>(memory);
    there.starts = reinterpret_cast<int32_t*>(memory + 4 * blocks);
    there.low_starts = there.starts + parts;
    there.shifts = reinterpret_cast<float*>(memory + 4 * blocks + 8 * parts);
    there.codes = reinterpret_cast<int8_t*>(memory + 4 * blocks + 12 * parts);
    there.low = there.codes + numbers;
    there.wide = reinterpret_cast<uint8_t*>(there.low + numbers);
    return there;
  };
  if (prepared && !own) {
    rows = placed();
    const int64_t piece = std::max<int64_t>(1, 16384 / w.inputs);
    Team::Run(pool, rows.count, piece, [&](int64_t first, int64_t last, bool) { kernels.prepare(rows, w.inputs, first, last); });
  }
  const int64_t width = out->dimensions()[1], tiles = gate ? w.tiles() / 2 : w.tiles(), piece = gate ? 1 : 2;  // two are multiplied together
  std::fill_n(products.out + held * width, (x.dimensions()[0] - held) * width, 0.0f);
  auto* groups = static_cast<Group*>(Scratch(Use::kGroups, sizeof(Group) * matrices));
  const int64_t each = (tiles + piece - 1) / piece;  // pieces of a group
  Team::Run(pool, each * Share(sizes, matrices, groups), 1, [&](int64_t first, int64_t last, bool fresh) {
    const Rows mine = own ? placed() : rows;
    if (own && fresh) kernels.prepare(mine, w.inputs, 0, mine.count);
    for (int64_t end; first < last; first = end) {
      const Group& group = groups[first / each];
      const int64_t begin = first / each * each;
      end = std::min(last, begin + each);
      kernels.multiply(MatrixAt(w, group.matrix), RowsFrom(mine, w.inputs, group.row, group.count), ProductsFrom(products, width, group.row),
                       (first - begin) * piece, std::min(tiles, (end - begin) * piece));
    }
  });
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
