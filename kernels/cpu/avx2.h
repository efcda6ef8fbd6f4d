// Vectors of 16 numbers, as pairs of AVX2's.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diptych::avx2 {

constexpr int kTokens = 2;
constexpr int kQueries = 1;
constexpr bool kPairs = false;
inline bool HasPairs() { return false; }

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {  // 16 x 4
  __m256i a, b;
};

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_first(float* p, Floats x, int count) {
  float whole[16];
  store(whole, x);
  std::memcpy(p, whole, count * sizeof(float));
}
inline Floats load_first(const float* p, int count) {
  float whole[16] = {};
  std::memcpy(whole, p, count * sizeof(float));
  return load(whole);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 times_power(__m256 x, __m256i n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
inline Floats times_power(Floats x, Ints n) { return {times_power(x.a, n.a), times_power(x.b, n.b)}; }
inline __m256i bfloats(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_bfloats(uint16_t* p, Floats x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(bfloats(x.a), bfloats(x.b)), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
inline Floats to_bfloats(Floats x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bfloats(x.a), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(bfloats(x.b), 16))};
}
inline __m256i largest_bits(Floats x) {
  const __m256i sign = _mm256_set1_epi32(0x7FFFFFFF);
  return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x.a), sign), _mm256_and_si256(_mm256_castps_si256(x.b), sign));
}
inline float largest_size(Floats x, Floats y) {  // as integers the bits of what is infinite or no number are larger than those of any number
  int32_t each[8], found = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), _mm256_max_epi32(largest_bits(x), largest_bits(y)));
  for (int32_t bits : each) found = bits > found ? bits : found;
  float size;
  std::memcpy(&size, &found, 4);
  return size;
}
inline Ints load(const int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline __m256 picked(Floats x, __m256i index) {
  const __m256 above = _mm256_castsi256_ps(_mm256_cmpgt_epi32(index, _mm256_set1_epi32(7)));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(x.a, index), _mm256_permutevar8x32_ps(x.b, index), above);
}
inline Floats picked(Floats x, Ints index) { return {picked(x, index.a), picked(x, index.b)}; }  // of the 16, by number
inline float largest(Floats x) {
  float each[8];
  _mm256_storeu_ps(each, _mm256_max_ps(x.a, x.b));
  float found = each[0];
  for (float value : each) found = value > found ? value : found;
  return found;
}
inline float sum(Floats x) {
  float each[8], total = 0;
  _mm256_storeu_ps(each, _mm256_add_ps(x.a, x.b));
  for (float value : each) total += value;
  return total;
}
inline int32_t sum(Ints x) {
  int32_t each[8], total = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), _mm256_add_epi32(x.a, x.b));
  for (int32_t value : each) total += value;
  return total;
}
inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints sub(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
template <int kBits>
inline Ints left(Ints x) {
  return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
}
template <int kBits>
inline Ints right(Ints x) {  // rounded down
  return {_mm256_srai_epi32(x.a, kBits), _mm256_srai_epi32(x.b, kBits)};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints round_to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_bytes(int8_t* p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline __m128i sixteen(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i eight(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Floats from_half(const uint16_t* p) { return {_mm256_cvtph_ps(sixteen(p)), _mm256_cvtph_ps(sixteen(p + 8))}; }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline __m256 wide(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
inline Floats from_bfloat(const uint16_t* p) { return {wide(sixteen(p)), wide(sixteen(p + 8))}; }
inline Floats from_unsigned(const uint8_t* p) {
  return to_floats({_mm256_cvtepu8_epi32(eight(p)), _mm256_cvtepu8_epi32(eight(p + 8))});
}
inline Floats from_signed(const int8_t* p) { return to_floats({_mm256_cvtepi8_epi32(eight(p)), _mm256_cvtepi8_epi32(eight(p + 8))}); }
inline __m256 power(__m128i bytes) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_max_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(1)), 23));
}
inline Floats from_exponent(const uint8_t* p) { return {power(eight(p)), power(eight(p + 8))}; }

inline Bytes load_bytes(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
template <int kShift, int kMask>
inline Bytes bits(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(kMask));
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, kShift), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, kShift), mask)};
}
template <int kShift>
inline Bytes above(Bytes low, Bytes high) {
  return {_mm256_or_si256(low.a, _mm256_slli_epi16(high.a, kShift)), _mm256_or_si256(low.b, _mm256_slli_epi16(high.b, kShift))};
}
inline Bytes look_up(const uint8_t (&table)[16], Bytes index) {
  const __m256i t = _mm256_broadcastsi128_si256(sixteen(table));
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
template <int kByte>
inline Ints byte_of_each(Bytes x) {
  const __m256i mask = _mm256_set1_epi32(255);
  return {_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * kByte), mask), _mm256_and_si256(_mm256_srli_epi32(x.b, 8 * kByte), mask)};
}
struct Four {  // the even ones and the odd ones, in 16 bits each
  __m256i even, odd;
};
inline Four four(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  const __m256i all = _mm256_set1_epi32(x);
  return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
inline __m256i dot_half(__m256i sum, __m256i w, Four x) {  // in 16 bits: sums of products of bytes would not fit
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd)));
}
inline Ints dot(Ints sum, Bytes w, Four x) { return {dot_half(sum.a, w.a, x), dot_half(sum.b, w.b, x)}; }

}  // namespace diptych::avx2
