// The handlers as XLA calls them, and the Python module that hands them over.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>
#include <string>

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
  if (memory.size < bytes) {
    std::free(memory.data);
    memory.size = (bytes + bytes / 2 + 63) / 64 * 64;
    memory.data = std::aligned_alloc(64, memory.size);
    if (memory.data == nullptr) std::abort();
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
// a bit each. `activations`: 0 as they are, 1 rounded to int8 by blocks of 32, 2 by rows.
ffi::Error Matmul(ffi::ThreadPool pool, int32_t code, int32_t zero, int32_t present, int32_t activations, ffi::Buffer<ffi::F32> x,
                  ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> out) {
  if (x.dimensions().size() != 2 || out->dimensions().size() != 2) return Wrong("matmul takes and gives two axes");
  Weights w{};
  w.code = static_cast<Code>(code);
  w.zero = zero;
  w.inputs = x.dimensions()[1];
  w.outs = out->dimensions()[1];
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
  for (int bit = 0; bit < 4; ++bit) wanted += present >> bit & 1;
  if (rest.size() != wanted) return Wrong("matmul takes " + std::to_string(wanted) + " arrays of weights");
  int64_t size = 0;
  for (int plane = 0; plane < (two ? 2 : 1); ++plane) {
    w.planes[plane] = static_cast<const uint8_t*>(take(&size).untyped_data());
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
  const int64_t span = w.inputs / w.groups;
  if (span >= kBlock && span % kBlock) return Wrong("groups must be whole blocks");
  if (activations == 2 && (w.groups != 1 || (present & 3) || w.inputs > 65536)) activations = 1;

  Rows rows{};
  rows.x = x.typed_data();
  rows.count = x.dimensions()[0];
  rows.rounded = activations != 0;
  rows.whole = activations == 2;
  const MatmulKernels& kernels = Matmuls();
  if (rows.rounded) {
    const int64_t numbers = rows.count * w.inputs, blocks = rows.count * w.blocks();
    auto* memory = static_cast<char*>(Scratch(Use::kRows, 12 * blocks + numbers));
    rows.scales = reinterpret_cast<float*>(memory);
    rows.sums = reinterpret_cast<int32_t*>(memory + 4 * blocks);
    rows.codes = reinterpret_cast<int8_t*>(memory + 12 * blocks);
    const int64_t piece = std::max<int64_t>(1, 32768 / w.inputs);
    Team::Run(pool, rows.count, rows.count <= piece ? rows.count : piece,
              [&](int64_t first, int64_t last) { kernels.round(rows, w.inputs, first, last); });
  }
  // Pieces of about 64k weights times rows, eight to a thread at least.
  const int64_t tiles = w.tiles(), work = kRows * w.inputs * std::max<int64_t>(1, rows.count / 4);
  const int64_t piece = std::max<int64_t>(1, std::min(tiles / 16, 65536 / work));
  Team::Run(pool, tiles, piece, [&](int64_t first, int64_t last) { kernels.multiply(w, rows, out->typed_data(), first, last); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMatmulHandler, Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int32_t>("code")
                           .Attr<int32_t>("zero")
                           .Attr<int32_t>("present")
                           .Attr<int32_t>("activations")
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>());

PyObject* Targets(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  const auto add = [found](const char* name, void* handler) {
    PyObject* capsule = PyCapsule_New(handler, "xla._CUSTOM_CALL_TARGET", nullptr);
    if (capsule != nullptr) PyDict_SetItemString(found, name, capsule);
    Py_XDECREF(capsule);
  };
  if (found != nullptr) add("diptych_matmul", reinterpret_cast<void*>(+kMatmulHandler));
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
