// What the fuzzed operations share. An operation is a function that makes up one call, makes it, and checks what can be told of any answer; the
// sanitizers find the rest. To add one: declare it at the end, and add it to the table of `main.cc`.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

namespace diptych::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }  // both included
  bool chance(int percent) { return between(1, 100) <= percent; }
  float normal() { return std::normal_distribution<float>()(engine_); }
  template <class T>
  T one_of(std::initializer_list<T> some) {
    return some.begin()[between(0, static_cast<int64_t>(some.size()) - 1)];
  }
  float extreme() {  // what activations should not be, and may
    return one_of({0.0f, -0.0f, 1e-45f, -1e-40f, 1e-37f, 3e38f, -1e30f, std::numeric_limits<float>::infinity(),
                   std::numeric_limits<float>::quiet_NaN()});
  }

 private:
  std::mt19937_64 engine_;
};

// An array of exactly `size` elements, each what `make` gives: an access before or past it is found.
template <class T, class Make>
std::vector<T> array(int64_t size, const Make& make) {
  std::vector<T> made(size);
  for (T& each : made) each = static_cast<T>(make());
  return made;
}

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

void Describe(const char* format, ...) __attribute__((format(printf, 1, 2)));  // the call, for the report if it fails
void Check(bool holds, const char* what);

void FuzzMatmul(Random& random, bool avx512);
void FuzzAttention(Random& random, bool avx512);

}  // namespace diptych::fuzz
