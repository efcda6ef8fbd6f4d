// The handlers as XLA calls them, and the Python module that hands them over.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "attention.h"
#include "matmul.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace diptych {

void* Scratch(Use use, size_t bytes) {
  struct Memory {
    void* data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
  };
  thread_local Memory memories[static_cast<int>(Use::kCount)];
  Memory& memory = memories[static_cast<int>(use)];
#ifdef __SANITIZE_ADDRESS__
  constexpr bool kExact = true;  // so that what lies past the end is found
#else
  constexpr bool kExact = false;
#endif
  if (memory.size < bytes || (kExact && memory.size > bytes)) {
    std::free(memory.data);
    memory.size = kExact ? bytes : bytes + bytes / 2;
    if (posix_memalign(&memory.data, 64, memory.size) != 0) std::abort();
  }
  return memory.data;
}

namespace {

bool HasAvx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  return has;
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has;
}

bool use_avx2_only = false;  // for tests

const AttentionKernels& Attentions() { return HasAvx512() && !use_avx2_only ? kAttentionAvx512 : kAttentionAvx2; }
const MatmulKernels& Matmuls() { return HasAvx512() && !use_avx2_only ? kMatmulAvx512 : kMatmulAvx2; }

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("diptych kernels: " + what); }

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

XLA_FFI_DEFINE_HANDLER(kMatmulHandler, Matmul,
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

// New keys and values into a cache, and answers from it. keys [L, X, K, H, S] and values [L, X, K, S, V], f32 or the bits of bf16, are written
// in place. `after`: queries see the new rows in the cache, else (they may overwrite what is seen) as they are given.
ffi::Error AttendCache(ffi::ThreadPool pool, int32_t layout, int32_t window, float scale, float softcap, int32_t after, ffi::AnyBuffer keys,
                       ffi::AnyBuffer values, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> new_keys, ffi::Buffer<ffi::F32> new_values,
                       ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> start,
                       ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::F32> sinks,
                       ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> keys_out, ffi::Result<ffi::AnyBuffer> values_out) {
  const auto kd = keys.dimensions(), vd = values.dimensions(), qd = q.dimensions(), nd = new_keys.dimensions(), td = table.dimensions();
  if (kd.size() != 5 || vd.size() != 5 || qd.size() != 4 || nd.size() != 4 || td.size() != 2) return Wrong("attention takes other ranks");
  Attend a{};
  a.B = qd[0], a.T = qd[1], a.N = qd[2], a.H = qd[3], a.K = kd[2], a.V = vd[4];
  a.X = kd[1], a.S = kd[4], a.M = td[1], a.New = nd[1];
  const int64_t B = a.B;
  if (kd[3] != a.H || vd[0] != kd[0] || vd[1] != a.X || vd[2] != a.K || vd[3] != a.S || a.K == 0 || a.N % a.K || nd[0] != B ||
      static_cast<int64_t>(new_keys.element_count()) != B * a.New * a.K * a.H ||
      static_cast<int64_t>(new_values.element_count()) != B * a.New * a.K * a.V || td[0] != B ||
      static_cast<int64_t>(rows.element_count()) != B || static_cast<int64_t>(start.element_count()) != B ||
      static_cast<int64_t>(count.element_count()) != B || static_cast<int64_t>(limit.element_count()) != B * a.T ||
      static_cast<int64_t>(out->element_count()) != B * a.T * a.N * a.V || layer.element_count() != 1 ||
      (sinks.element_count() != 0 && static_cast<int64_t>(sinks.element_count()) != a.N)) {
    return Wrong("attention's sizes do not fit one another");
  }
  if (keys.element_type() != values.element_type()) return Wrong("keys and values are of different formats");
  a.bf16 = keys.element_type() == ffi::DataType::U16;
  if (!a.bf16 && keys.element_type() != ffi::DataType::F32) return Wrong("attention reads caches of f32, or of bf16's bits");
  if (keys_out->untyped_data() != keys.untyped_data() || values_out->untyped_data() != values.untyped_data()) {
    return Wrong("the cache must be written in place");
  }
  a.layout = static_cast<Layout>(layout);
  a.layer = layer.typed_data()[0];
  if (a.layer < 0 || a.layer >= kd[0]) return Wrong("no such layer");
  a.keys = static_cast<char*>(keys_out->untyped_data()), a.values = static_cast<char*>(values_out->untyped_data());
  a.q = q.typed_data(), a.out = out->typed_data(), a.limit = limit.typed_data();
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.scale = scale, a.softcap = softcap, a.window = window;
  a.rows = rows.typed_data(), a.table = table.typed_data(), a.start = start.typed_data(), a.count = count.typed_data();
  a.new_keys = new_keys.typed_data(), a.new_values = new_values.typed_data();
  a.after = after != 0;
  if (a.layout != Layout::kPaged) {
    for (int64_t b = 0; b < B; ++b) {
      if (a.rows[b] < 0 || a.rows[b] >= a.X) return Wrong("row " + std::to_string(a.rows[b]) + " is not of the cache");
    }
  }
  const AttentionKernels& kernels = Attentions();
  const auto append = [&] {
    const int64_t piece = a.New * (a.H + a.V) < 8192 ? B * a.K : 1;
    Team::Run(pool, B * a.K, piece, [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; ++each) kernels.append(a, each / a.K, each % a.K);
    });
  };
  if (a.after && a.New) append();

  const int64_t G = a.group(), span = std::min(a.tokens_per_block(), a.T), blocks = a.query_blocks(), lanes = B * a.K * blocks;
  int64_t parts = 1;
  if (lanes < 8 && a.T == 1) {
    int64_t longest = 0;
    for (int64_t b = 0; b < B; ++b) longest = std::max<int64_t>(longest, a.limit[b] + 1);
    if (a.window) longest = std::min(longest, a.window);
    parts = std::clamp<int64_t>(longest / kSplit, 1, 8);
  }
  const int64_t rows_most = span * G, floats = rows_most * (2 + a.V);
  const auto partial = [&](float* memory) { return Partial{memory, memory + rows_most, memory + 2 * rows_most}; };
  float* shared = parts == 1 ? nullptr : static_cast<float*>(Scratch(Use::kRows, sizeof(float) * lanes * parts * floats));
  const auto finish = [&](int64_t lane, const float* memory, int64_t count) {  // `count` partial answers as one
    const int64_t b = lane / blocks / a.K, k = lane / blocks % a.K, first = lane % blocks * span, last = std::min(first + span, a.T);
    for (int64_t t = first; t < last; ++t) {
      for (int64_t g = 0; g < G; ++g) {
        const int64_t r = (t - first) * G + g, n = k * G + g;
        float* out = a.out + ((b * a.T + t) * a.N + n) * a.V;
        float top = -1e30f, total = 0;
        for (int64_t part = 0; part < count; ++part) top = std::max(top, memory[part * floats + r]);
        for (int64_t v = 0; v < a.V; ++v) out[v] = 0;
        if (top == -1e30f) continue;  // nothing was seen
        if (a.sinks) top = std::max(top, a.sinks[n]), total = std::exp(a.sinks[n] - top);
        for (int64_t part = 0; part < count; ++part) total += std::exp(memory[part * floats + r] - top) * memory[part * floats + rows_most + r];
        for (int64_t part = 0; part < count; ++part) {
          const float share = std::exp(memory[part * floats + r] - top) / std::max(total, 1e-30f);
          const float* from = memory + part * floats + 2 * rows_most + r * a.V;
          if (memory[part * floats + rows_most + r] == 0) continue;
          for (int64_t v = 0; v < a.V; ++v) out[v] += share * from[v];
        }
      }
    }
  };
  Team::Run(pool, lanes * parts, 1, [&](int64_t first_item, int64_t last_item) {
    for (int64_t item = first_item; item < last_item; ++item) {
      const int64_t lane = item / parts, part = item % parts;
      const int64_t b = lane / blocks / a.K, k = lane / blocks % a.K, first = lane % blocks * span, last = std::min(first + span, a.T);
      float* memory = shared ? shared + item * floats : static_cast<float*>(Scratch(Use::kPartial, sizeof(float) * floats));
      int64_t low = 0, high = INT64_MAX;
      if (parts > 1) {
        const int64_t end = a.limit[b] + 1, begin = a.window ? std::max<int64_t>(end - a.window, 0) : 0;
        const int64_t each = ((end - begin + parts - 1) / parts + kSlots - 1) / kSlots * kSlots;
        low = begin + part * each, high = std::min(low + each, end);
      }
      kernels.answer(a, b, k, first, last, low, high, partial(memory));
      if (!shared) finish(lane, memory, 1);
    }
  });
  for (int64_t lane = 0; shared && lane < lanes; ++lane) finish(lane, shared + lane * parts * floats, parts);
  if (!a.after && a.New) append();
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kAttendHandler, AttendCache,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int32_t>("layout")
                           .Attr<int32_t>("window")
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<int32_t>("after")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

PyObject* Targets(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  const auto add = [found](const char* name, void* handler) {
    PyObject* capsule = PyCapsule_New(handler, "xla._CUSTOM_CALL_TARGET", nullptr);
    if (capsule != nullptr) PyDict_SetItemString(found, name, capsule);
    Py_XDECREF(capsule);
  };
  if (found == nullptr) return nullptr;
  add("diptych_matmul", reinterpret_cast<void*>(+kMatmulHandler));
  add("diptych_attend", reinterpret_cast<void*>(+kAttendHandler));
  return found;
}

PyObject* InstructionSet(PyObject*, PyObject*) {
  if (HasAvx512() && !use_avx2_only) return PyUnicode_FromString("avx512");
  if (HasAvx2()) return PyUnicode_FromString("avx2");
  Py_RETURN_NONE;
}

PyObject* UseAvx2Only(PyObject*, PyObject* only) {
  const int wanted = PyObject_IsTrue(only);
  if (wanted < 0) return nullptr;
  use_avx2_only = wanted != 0;
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"targets", Targets, METH_NOARGS, "Handlers by name, as `jax.ffi.register_ffi_target` takes them."},
    {"instruction_set", InstructionSet, METH_NOARGS, "'avx512', 'avx2', or None where this machine has neither."},
    {"use_avx2_only", UseAvx2Only, METH_O, "For tests: whether to leave newer instruction sets alone."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "native", "Diptych's kernels for CPUs.", -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace diptych

PyMODINIT_FUNC PyInit_native() { return PyModule_Create(&diptych::kModule); }
