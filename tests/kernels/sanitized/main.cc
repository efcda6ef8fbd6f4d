// Calls the kernels with made-up shapes and numbers: `fuzz SEED CASES [OPERATION]`. A case that fails is named with its own seed, and is made
// again by `fuzz THAT_SEED 1 OPERATION`.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz.h"
#include "matmul.h"

namespace diptych {

// Each call has memory of its own that ends where it was said to, filled with what is not a number.
void* Scratch(Use use, size_t bytes) {
  static std::vector<char> memories[static_cast<int>(Use::kCount)];
  auto& memory = memories[static_cast<int>(use)];
  memory = std::vector<char>(bytes, static_cast<char>(0xFF));
  memory.shrink_to_fit();
  return memory.data();
}

namespace fuzz {

char call[512], what[512];

void Report(int) {  // of SIGABRT, which the sanitizers are told to end with
  std::fprintf(stderr, "in %s: %s\n", call, what);
  std::_Exit(1);
}

void Describe(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
}

void Check(bool holds, const char* what_holds) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what_holds);
  std::abort();
}

constexpr struct {
  const char* name;
  void (*run)(Random&, bool avx512);
} kOperations[] = {{"matmul", FuzzMatmul}, {"attention", FuzzAttention}};

int Main(int count, char** arguments) {
  if (count < 3) return 2;
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10), cases = std::strtoull(arguments[2], nullptr, 10);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  std::signal(SIGABRT, Report);
  for (const auto& operation : kOperations) {
    if (count > 3 && std::strcmp(arguments[3], operation.name) != 0) continue;
    uint64_t made = 0;
    for (bool avx512 : {false, true}) {
      if (avx512 ? !has_avx512 : !has_avx2) continue;
      for (uint64_t each = seed; each < seed + cases; ++each, ++made) {
        std::snprintf(call, sizeof call, "%s, seed %llu, %s", operation.name, static_cast<unsigned long long>(each), avx512 ? "avx512" : "avx2");
        Random random(each);
        operation.run(random, avx512);
      }
    }
    std::printf("%s: %llu calls\n", operation.name, static_cast<unsigned long long>(made));
  }
  return 0;
}

}  // namespace fuzz
}  // namespace diptych

int main(int count, char** arguments) { return diptych::fuzz::Main(count, arguments); }
