// Attention over a cache: what the lowerings for each instruction set are given.
#pragma once

#include <cstdint>

namespace diptych {

enum class Layout : int32_t { kDense, kRing, kPaged };

constexpr int kSlots = 64;          // read at a time by many queries
constexpr int kLongest = 1024;      // by few: elements of keys lie in pieces of that many slots
constexpr int kQueryRows = 48;      // queries of one KV head that share a pass over the slots
constexpr int64_t kSplit = 256;     // slots of a part at least, where the positions of one query are cut in parts for several threads

// A call: new tokens' keys and values are written, and their queries answered. Arrays are in C order, but what the KV heads have of a token
// in q, new_keys and new_values lies `q_step`, `key_step` and `value_step` numbers apart: the three may be one array.
struct Attend {
  int64_t B, T, N, K, H, V;       // rows, queries of each, heads of queries and of keys, elements of a key and of a value
  const float* q;                 // [B, T, K, G, H]
  float* out;                     // [B, T, N, V]
  const int32_t* limit;           // [B, T], the last position that a query sees; below 0: none
  const float* sinks;             // [N], or null
  float scale, softcap;           // softcap 0: none
  int64_t window;                 // 0: none
  Layout layout;
  bool bf16;                      // of the cache; else f32, or int8
  bool rounded;                   // queries and weights of values to bf16, in front of their products
  int64_t layer, X, S;            // of L; rows or pages of the arrays, slots of each
  char *keys, *values;            // [L, X, K, H, S] and [L, X, K, S, V]
  int64_t channels;               // of a head that share a scale, a multiple of 16 that divides H and V: the cache is of int8; 0: it is not
  uint16_t *key_scales, *value_scales;  // f16: [L, X, K, H / channels, S] and [L, X, K, S, V / channels]
  const int32_t *rows, *table;    // [B]; [B, M], pages
  int64_t M;
  const int32_t *start, *count;   // [B]: tokens held before, and new ones
  int64_t New;                    // tokens of new_keys, padding included; 0: nothing is written
  const float *new_keys, *new_values;  // [B, New, K, H] and [B, New, K, V]
  bool after;                     // whether the queries see the new rows in the cache; else beside it
  int64_t q_step, key_step, value_step;
  // Queries and keys are first normed, x / sqrt(mean(x^2) + eps) * norm, then their first `dim` elements rotated, x * cos + roll(x, dim / 2) *
  // sin. Only if `after`, and if New is T or 0.
  const float *q_norm, *k_norm;   // [H], or null
  float eps;
  int64_t dim;                    // even, at most H; 0: no rotation
  const float *cos, *sin;         // [B, T, dim]

  int64_t group() const { return N / K; }
  int64_t tokens_per_block() const { return kQueryRows / group() > 0 ? kQueryRows / group() : 1; }
  int64_t query_blocks() const { return (T + tokens_per_block() - 1) / tokens_per_block(); }
  int64_t held(int64_t b) const { return start[b] + (after ? count[b] : 0); }
};

// The answers to some rows of queries from some positions, with what joins them to those from others: [rows], [rows], [rows, V].
struct Partial {
  float *top, *total, *out;
};

struct AttentionKernels {
  void (*append)(const Attend&, int64_t b, int64_t k);  // the new rows of row b, KV head k
  // Queries of tokens [first, last) of row b under KV head k, from positions [low, high).
  void (*answer)(const Attend&, int64_t b, int64_t k, int64_t first, int64_t last, int64_t low, int64_t high, const Partial&);
};

extern const AttentionKernels kAttentionAvx2, kAttentionAvx512;

}  // namespace diptych
