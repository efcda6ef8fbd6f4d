// Vectors of 16 numbers, for AVX-512 with VNNI.
#pragma once
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diptych::avx512 {

constexpr int kTokens = 4;   // rows of activations that are multiplied at once
constexpr int kQueries = 6;  // rows of queries
constexpr bool kPairs = true;  // whether there are products of pairs of bf16, see `HasPairs`

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {  // 16 x 4
  __m512i v;
};

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Ints broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float* p, Floats x, int count) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x.v); }
inline Floats load_first(const float* p, int count) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats times_power(Floats a, Ints n) {  // a * 2^n
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
inline __m512i bfloats(__m512 x) {  // bf16's bits, to the nearest, ties to even; a nan stays one
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
}
inline void store_bfloats(uint16_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bfloats(a.v)));
}
inline Floats to_bfloats(Floats a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(bfloats(a.v), 16))}; }  // still in 32 bits
inline float largest_size(Floats a, Floats b) {  // as integers the bits of what is infinite or no number are larger than those of any number
  const __m512i sign = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i each = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), sign), _mm512_and_si512(_mm512_castps_si512(b.v), sign));
  const int32_t bits = _mm512_reduce_max_epi32(each);
  float size;
  std::memcpy(&size, &bits, 4);
  return size;
}
inline Ints load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Floats picked(Floats a, Ints index) { return {_mm512_permutexvar_ps(index.v, a.v)}; }  // of the 16, by number
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int kBits>
inline Ints left(Ints a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline Ints right(Ints a) {  // rounded down
  return {_mm512_srai_epi32(a.v, kBits)};
}
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints round_to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_bytes(int8_t* p, Ints a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline Floats from_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline __m512i words(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats from_bfloat(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(words(p), 16))}; }
inline Floats from_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats from_signed(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats from_exponent(const uint8_t* p) {  // 2^(e - 127); of e = 0 the next larger, which no weight needs
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_max_epi32(e, _mm512_set1_epi32(1)), 23))};
}

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
template <int kShift, int kMask>
inline Bytes bits(Bytes a) {  // of every byte
  const __m512i moved = kShift == 0 ? a.v : _mm512_srli_epi16(a.v, kShift);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(kMask)))};
}
template <int kShift>
inline Bytes above(Bytes low, Bytes high) {  // low | high << kShift
  return {_mm512_or_si512(low.v, _mm512_slli_epi16(high.v, kShift))};
}
inline Bytes look_up(const uint8_t (&table)[16], Bytes index) {
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(t, index.v)};
}
template <int kByte>
inline Ints byte_of_each(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 8 * kByte), _mm512_set1_epi32(255))};
}
struct Four {  // activations, the same for all rows
  __m512i v;
};
inline Four four(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
inline Ints dot(Ints sum, Bytes w, Four x) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }

struct Pairs {  // 16 x 2 bf16
  __m512i v;
};
inline bool HasPairs() {  // AVX512-BF16; by number, since not every compiler knows its name
  static const bool has = [] {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
  }();
  return has;
}
inline void store_high(uint16_t* p, Floats a) {  // of numbers that `to_bfloats` gave
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16)));
}
inline Pairs load_pairs(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs same_pair(const uint32_t* p) { return {_mm512_set1_epi32(static_cast<int>(*p))}; }
inline void store_pairs(uint32_t* p, const uint16_t* first, const uint16_t* second) {
  _mm512_storeu_si512(p, _mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16)));
}
inline Pairs bfloat_pairs(Floats first, Floats second) {  // numbers that follow one another; this and `dot` as intrinsics would ask for all of
  Pairs both;                                             // the file to be compiled for them
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both.v) : "v"(second.v), "v"(first.v));
  return both;
}
inline void store(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
inline Floats dot(Floats sum, Pairs a, Pairs b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}

}  // namespace diptych::avx512
