// The Python module that hands the handlers over, the instruction set that they use, and their memory.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>

#include "handlers.h"

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

}  // namespace

const AttentionKernels& Attentions() { return HasAvx512() && !use_avx2_only ? kAttentionAvx512 : kAttentionAvx2; }
const MatmulKernels& Matmuls() { return HasAvx512() && !use_avx2_only ? kMatmulAvx512 : kMatmulAvx2; }

namespace {

PyObject* Targets(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  const auto add = [found](const char* name, void* handler) {
    PyObject* capsule = PyCapsule_New(handler, "xla._CUSTOM_CALL_TARGET", nullptr);
    if (capsule != nullptr) PyDict_SetItemString(found, name, capsule);
    Py_XDECREF(capsule);
  };
  if (found == nullptr) return nullptr;
  add("diptych_matmul", reinterpret_cast<void*>(&DiptychMatmul));
  add("diptych_attend", reinterpret_cast<void*>(&DiptychAttend));
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
