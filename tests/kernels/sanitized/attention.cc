// Appending to caches of each layout and attention over them. What a cache does not hold is not a number, so that an answer tells if it was
// read.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fuzz.h"

namespace diptych::fuzz {

void FuzzAttention(Random& random, bool avx512) {
  const AttentionKernels& kernels = avx512 ? kAttentionAvx512 : kAttentionAvx2;
  Attend a{};
  a.B = random.between(1, 3);
  a.T = random.chance(50) ? 1 : random.between(2, 40);
  a.K = random.between(1, 3);
  a.N = a.K * random.between(1, random.chance(10) ? 60 : 9);
  a.H = random.between(1, 80);
  a.V = random.between(1, 80);
  a.layout = random.one_of({Layout::kDense, Layout::kRing, Layout::kPaged});
  a.bf16 = random.chance(50);
  if (random.chance(40)) {  // int8
    a.bf16 = false, a.channels = 16 * random.between(1, 4);
    a.H = a.channels * random.between(1, 4), a.V = a.channels * random.between(1, 4);
  }
  const bool joined = random.chance(40);
  if (joined) a.V = a.H;
  a.after = joined || random.chance(50);
  a.rounded = random.chance(50);
  a.scale = 0.25f;
  a.softcap = random.chance(30) ? 20.0f : 0.0f;
  a.window = random.chance(40) ? random.between(1, 100) : 0;
  a.X = random.between(a.layout == Layout::kPaged ? 1 : a.B, 8);
  a.S = a.layout == Layout::kPaged ? random.between(1, 80) : random.between(1, random.chance(20) ? 700 : 150);
  a.M = a.layout == Layout::kPaged ? random.between(0, 6) : 0;
  const int64_t layers = random.between(1, 2), most = a.layout == Layout::kPaged ? a.M * a.S : a.S;
  a.layer = random.between(0, layers - 1);

  std::vector<int32_t> start, count, limit;
  for (int64_t b = 0; b < a.B; ++b) {
    // Rings go round; the others may be asked for more than they have room for, and drop it.
    start.push_back(static_cast<int32_t>(a.layout == Layout::kRing ? random.between(0, 5 * a.S) : random.between(0, most + (random.chance(10) ? 9 : 0))));
    count.push_back(static_cast<int32_t>(random.between(0, a.T)));
    for (int64_t t = 0; t < a.T; ++t) {
      limit.push_back(random.chance(10) ? -1 : static_cast<int32_t>(start[b] + (t < count[b] ? t : count[b] - 1)));
    }
  }
  const int64_t taken = a.layout == Layout::kPaged ? a.B * a.M : 0;
  const auto table = array<int32_t>(taken, [&] { return random.between(0, a.X); });  // X: no page
  std::vector<int32_t> rows;
  for (int64_t b = 0; b < a.B; ++b) rows.push_back(static_cast<int32_t>(a.layout == Layout::kPaged ? b : a.X - 1 - b));
  const auto q = array<float>(a.B * a.T * a.N * a.H, [&] { return random.normal(); });
  const int64_t slots = layers * a.X * a.K * a.S, bytes = slots * (a.channels ? 1 : a.bf16 ? 2 : 4);
  auto keys = array<char>(bytes * a.H, [] { return 0xFF; }), values = array<char>(bytes * a.V, [] { return 0xFF; });
  a.q = q.data(), a.limit = limit.data(), a.rows = rows.data(), a.table = table.data(), a.start = start.data(), a.count = count.data();
  a.keys = keys.data(), a.values = values.data();
  const auto scales = [&](int64_t width) { return array<uint16_t>(a.channels ? slots * (width / a.channels) : 0, [] { return 0xFFFF; }); };
  auto key_scales = scales(a.H), value_scales = scales(a.V);
  a.key_scales = key_scales.data(), a.value_scales = value_scales.data();
  Describe("B %lld T %lld K %lld N %lld H %lld V %lld X %lld S %lld M %lld layout %d bf16 %d channels %lld after %d joined %d softcap %g window %lld",
           static_cast<long long>(a.B), static_cast<long long>(a.T), static_cast<long long>(a.K), static_cast<long long>(a.N),
           static_cast<long long>(a.H), static_cast<long long>(a.V), static_cast<long long>(a.X), static_cast<long long>(a.S),
           static_cast<long long>(a.M), static_cast<int>(a.layout), a.bf16, static_cast<long long>(a.channels), a.after, joined, a.softcap, static_cast<long long>(a.window));

  const auto append = [&](const Attend& call) {
    for (int64_t b = 0; b < a.B; ++b) {
      for (int64_t k = 0; k < a.K; ++k) kernels.append(call, b, k);
    }
  };
  // Values are 1, and weights sum up to 1. In int8 that is 127 times the f16 that is nearest to 1 / 127.
  const float value = a.channels ? 127 * 0.00787353515625f : 1;
  Attend past = a;  // what is held already, as one prompt; of a ring the tokens that are still there
  std::vector<int32_t> past_start, past_count;
  for (int64_t b = 0; b < a.B; ++b) {
    past_start.push_back(a.layout == Layout::kRing && start[b] > a.S ? static_cast<int32_t>(start[b] - a.S) : 0);
    past_count.push_back(start[b] - past_start[b]);
    past.New = std::max<int64_t>(past.New, past_count[b]);
  }
  const auto normal = [&] { return random.normal(); };
  const auto one = [] { return 1; };
  const auto past_keys = array<float>(a.B * past.New * a.K * a.H, normal), past_values = array<float>(a.B * past.New * a.K * a.V, one);
  past.start = past_start.data(), past.count = past_count.data(), past.new_keys = past_keys.data(), past.new_values = past_values.data();
  const int64_t group = a.group();
  past.key_step = a.H, past.value_step = a.V;
  append(past);
  a.New = random.chance(90) ? a.T : 0;
  if (a.New == 0) std::fill(count.begin(), count.end(), 0);
  const auto new_keys = array<float>(a.B * a.New * a.K * a.H, normal), new_values = array<float>(a.B * a.New * a.K * a.V, one);
  a.new_keys = new_keys.data(), a.new_values = new_values.data();
  a.q_step = group * a.H, a.key_step = a.H, a.value_step = a.V;
  const int64_t step = (group + 2) * a.H;
  int64_t at = 0;
  const auto qkv = array<float>(joined ? a.B * a.T * a.K * step : 0, [&] { return at++ % step < (group + 1) * a.H ? random.normal() : 1; });
  a.dim = joined && random.chance(80) ? 2 * random.between(0, a.H / 2) : 0;
  const auto cos = array<float>(a.B * a.T * a.dim, normal), sin = array<float>(a.B * a.T * a.dim, normal);
  const auto norms = array<float>(joined ? a.H : 0, normal);
  if (joined) {
    if (a.New) a.new_keys = qkv.data() + group * a.H, a.new_values = a.new_keys + a.H;
    a.q = qkv.data(), a.q_step = a.key_step = a.value_step = step;
    a.q_norm = random.chance(50) ? norms.data() : nullptr, a.k_norm = random.chance(50) ? norms.data() : nullptr;
    a.cos = cos.data(), a.sin = sin.data(), a.eps = 1e-5f;
  }
  if (a.after) append(a);

  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t k = 0; k < a.K; ++k) {
      for (int64_t first = 0; first < a.T; first += a.tokens_per_block()) {
        const int64_t last = std::min(first + a.tokens_per_block(), a.T), many = (last - first) * a.group();
        const bool part = random.chance(30);  // of the positions
        const int64_t low = part ? random.between(0, start[b]) : 0, high = part ? random.between(low, start[b] + a.T) : INT64_MAX;
        const auto unwritten = [] { return kUnwritten; };
        auto top = array<float>(many, unwritten), total = array<float>(many, unwritten), out = array<float>(many * a.V, unwritten);
        kernels.answer(a, b, k, first, last, low, high, Partial{top.data(), total.data(), out.data()});
        for (int64_t r = 0; r < many; ++r) {
          Check(std::isfinite(top[r]) && total[r] >= 0, "what is not held is not scored");
          for (int64_t v = 0; v < a.V; ++v) {
            Check(std::abs(out[r * a.V + v] - value * total[r]) <= 1e-4f * total[r], "values of 1 are answered by 1");
          }
        }
      }
    }
  }
  if (!a.after) append(a);
}

}  // namespace diptych::fuzz
