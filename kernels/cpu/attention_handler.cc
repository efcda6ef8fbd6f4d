// Attention over a cache, as XLA calls it.
#include <algorithm>
#include <cmath>
#include <string>

#include "handlers.h"
#include "team.h"

namespace ffi = xla::ffi;

namespace diptych {
namespace {

constexpr int64_t kParts = 8;  // at most, of one query's positions

// New keys and values into a cache, and answers from it. keys [L, X, K, H, S] and values [L, X, K, S, V], f32, the bits of bf16 or int8, are
// written in place; so are the bits of int8's f16 scales, which are the rest of the arguments and of the results. `after`: queries see the new
// rows in the cache, else (they may overwrite what is seen) as they are given. q is [B, T, N, H]; or queries, keys and values in one, [B, T, K,
// G + 2, H], while new_keys and new_values have no tokens. Only those are normed and rotated, see `Attend`: norms have no elements or H, cos
// and sin are [B, T, dim].
ffi::Error AttendCache(ffi::ThreadPool pool, int32_t layout, int32_t window, float scale, float softcap, float eps, int32_t after,
                       int32_t rounded,
                       ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> new_keys,
                       ffi::Buffer<ffi::F32> new_values,
                       ffi::Buffer<ffi::F32> q_norm, ffi::Buffer<ffi::F32> k_norm, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                       ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> start,
                       ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> limit, ffi::Buffer<ffi::F32> sinks,
                       ffi::RemainingArgs scales, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> keys_out,
                       ffi::Result<ffi::AnyBuffer> values_out, ffi::RemainingRets scales_out) {
  const auto kd = keys.dimensions(), vd = values.dimensions(), qd = q.dimensions(), nd = new_keys.dimensions(), td = table.dimensions();
  const auto cd = cos.dimensions(), sd = sin.dimensions();
  const bool joined = qd.size() == 5;
  if (kd.size() != 5 || vd.size() != 5 || (qd.size() != 4 && !joined) || nd.size() != 4 || td.size() != 2 || cd.size() != 3) {
    return Wrong("attention takes other ranks");
  }
  Attend a{};
  a.B = qd[0], a.T = qd[1], a.K = kd[2], a.H = kd[3], a.V = vd[4], a.N = joined ? a.K * (qd[3] - 2) : qd[2];
  a.X = kd[1], a.S = kd[4], a.M = td[1], a.New = nd[1], a.dim = cd[2];
  const int64_t B = a.B;
  if (qd[qd.size() - 1] != a.H || vd[0] != kd[0] || vd[1] != a.X || vd[2] != a.K || vd[3] != a.S || a.K == 0 || a.N < a.K || a.N % a.K ||
      nd[0] != B ||
      static_cast<int64_t>(new_keys.element_count()) != B * a.New * a.K * a.H ||
      static_cast<int64_t>(new_values.element_count()) != B * a.New * a.K * a.V || td[0] != B ||
      static_cast<int64_t>(rows.element_count()) != B || static_cast<int64_t>(start.element_count()) != B ||
      static_cast<int64_t>(count.element_count()) != B || static_cast<int64_t>(limit.element_count()) != B * a.T ||
      static_cast<int64_t>(out->element_count()) != B * a.T * a.N * a.V || layer.element_count() != 1 ||
      (sinks.element_count() != 0 && static_cast<int64_t>(sinks.element_count()) != a.N)) {
    return Wrong("attention's sizes do not fit one another");
  }
  for (const auto* norm : {&q_norm, &k_norm}) {
    if (norm->element_count() != 0 && static_cast<int64_t>(norm->element_count()) != a.H) return Wrong("a norm does not fit the heads");
  }
  if (cd[0] != B || cd[1] != a.T || !std::equal(cd.begin(), cd.end(), sd.begin(), sd.end()) || a.dim % 2 || a.dim > a.H) {
    return Wrong("angles do not fit the queries");
  }
  if (joined && (qd[2] != a.K || a.V != a.H || a.New || !after)) return Wrong("queries, keys and values in one do not fit the cache");
  if (!joined && (q_norm.element_count() || k_norm.element_count() || a.dim)) return Wrong("only joined queries and keys are normed and rotated");
  if (keys.element_type() != values.element_type()) return Wrong("keys and values are of different formats");
  a.bf16 = keys.element_type() == ffi::DataType::U16;
  const bool int8 = keys.element_type() == ffi::DataType::S8;
  if (!a.bf16 && !int8 && keys.element_type() != ffi::DataType::F32) return Wrong("attention reads caches of f32, of bf16's bits or of int8");
  if (scales.size() != (int8 ? 2 : 0) || scales_out.size() != scales.size()) return Wrong("keys and values of int8 have scales, others none");
  if (keys_out->untyped_data() != keys.untyped_data() || values_out->untyped_data() != values.untyped_data()) {
    return Wrong("the cache must be written in place");
  }
  if (int8) {
    const auto of_keys = scales.get<ffi::Buffer<ffi::U16>>(0), of_values = scales.get<ffi::Buffer<ffi::U16>>(1);
    auto keys_to = scales_out.get<ffi::Buffer<ffi::U16>>(0), values_to = scales_out.get<ffi::Buffer<ffi::U16>>(1);
    if (!of_keys || !of_values || !keys_to || !values_to) return Wrong("scales are the bits of f16");
    const auto ks = of_keys->dimensions(), vs = of_values->dimensions();
    if (ks.size() != 5 || vs.size() != 5 || ks[3] < 1 || !std::equal(kd.begin(), kd.begin() + 3, ks.begin()) || ks[4] != a.S ||
        !std::equal(vd.begin(), vd.begin() + 4, vs.begin())) {
      return Wrong("scales do not fit the keys and values");
    }
    a.channels = a.H / ks[3];
    if (a.channels == 0 || a.channels % 16 || a.channels * ks[3] != a.H || a.channels * vs[4] != a.V) {
      return Wrong("a scale is of a multiple of 16 channels, of keys and of values alike");
    }
    if ((*keys_to)->untyped_data() != of_keys->untyped_data() || (*values_to)->untyped_data() != of_values->untyped_data()) {
      return Wrong("the cache must be written in place");
    }
    a.key_scales = (*keys_to)->typed_data(), a.value_scales = (*values_to)->typed_data();
  }
  a.layout = static_cast<Layout>(layout);
  a.layer = layer.typed_data()[0];
  if (a.layer < 0 || a.layer >= kd[0]) return Wrong("no such layer");
  a.keys = static_cast<char*>(keys_out->untyped_data()), a.values = static_cast<char*>(values_out->untyped_data());
  a.q = q.typed_data(), a.new_keys = new_keys.typed_data(), a.new_values = new_values.typed_data();
  a.q_step = a.group() * a.H, a.key_step = a.H, a.value_step = a.V;
  if (joined) {
    a.New = a.T, a.new_keys = a.q + a.q_step, a.new_values = a.new_keys + a.H;
    a.q_step = a.key_step = a.value_step = a.q_step + 2 * a.H;
  }
  a.q_norm = q_norm.element_count() ? q_norm.typed_data() : nullptr, a.k_norm = k_norm.element_count() ? k_norm.typed_data() : nullptr;
  a.cos = cos.typed_data(), a.sin = sin.typed_data(), a.eps = eps;
  a.out = out->typed_data(), a.limit = limit.typed_data();
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.scale = scale, a.softcap = softcap, a.window = window;
  a.rows = rows.typed_data(), a.table = table.typed_data(), a.start = start.typed_data(), a.count = count.typed_data();
  a.after = after != 0, a.rounded = rounded != 0;
  if (a.layout != Layout::kPaged) {
    for (int64_t b = 0; b < B; ++b) {
      if (a.rows[b] < 0 || a.rows[b] >= a.X) return Wrong("row " + std::to_string(a.rows[b]) + " is not of the cache");
    }
  }
  const AttentionKernels& kernels = Attentions();
  const auto append = [&] {
    const int64_t piece = a.New * (a.H + a.V) < 8192 ? B * a.K : 1;
    Team::Run(pool, B * a.K, piece, [&](int64_t first, int64_t last, bool) {
      for (int64_t each = first; each < last; ++each) kernels.append(a, each / a.K, each % a.K);
    });
  };
  const bool each_writes = a.after && a.T == 1 && a.New == 1;  // the thread that reads a new token's slot writes it
  if (a.after && a.New && !each_writes) append();

  const int64_t G = a.group(), span = std::min(a.tokens_per_block(), a.T), blocks = a.query_blocks(), lanes = B * a.K * blocks;
  int64_t parts = 1;
  if (lanes < 8 && a.T == 1) {
    int64_t longest = 0;
    for (int64_t b = 0; b < B; ++b) longest = std::max<int64_t>(longest, a.limit[b] + 1);
    if (a.window) longest = std::min(longest, a.window);
    // A part should be long, see `kLongest`: there are some for each thread, and no more.
    const int64_t most = std::clamp<int64_t>(6 * pool.num_threads() / lanes, 1, kParts);
    parts = std::clamp<int64_t>(longest / kSplit, 1, most);
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
        float shares[kParts];
        for (int64_t part = 0; part < count; ++part) {
          shares[part] = std::exp(memory[part * floats + r] - top);
          total += shares[part] * memory[part * floats + rows_most + r];
        }
        for (int64_t part = 0; part < count; ++part) {
          const float share = shares[part] / std::max(total, 1e-30f);
          const float* from = memory + part * floats + 2 * rows_most + r * a.V;
          if (memory[part * floats + rows_most + r] == 0) continue;
          for (int64_t v = 0; v < a.V; ++v) out[v] += share * from[v];
        }
      }
    }
  };
  Team::Run(pool, lanes * parts, 1, [&](int64_t first_item, int64_t last_item, bool) {
    for (int64_t item = first_item; item < last_item; ++item) {
      const int64_t lane = item / parts, part = item % parts;
      const int64_t b = lane / blocks / a.K, k = lane / blocks % a.K, first = lane % blocks * span, last = std::min(first + span, a.T);
      float* memory = shared ? shared + item * floats : static_cast<float*>(Scratch(Use::kPartial, sizeof(float) * floats));
      int64_t low = 0, high = INT64_MAX, newest = 0;  // newest: the part that the last position is in
      if (parts > 1) {
        const int64_t end = a.limit[b] + 1, begin = a.window ? std::max<int64_t>(end - a.window, 0) : 0;
        const int64_t each = std::max<int64_t>(((end - begin + parts - 1) / parts + kSlots - 1) / kSlots * kSlots, kSlots);
        low = begin + part * each, high = std::min(low + each, end), newest = std::max<int64_t>(end - begin - 1, 0) / each;
      }
      if (each_writes && part == newest) kernels.append(a, b, k);
      kernels.answer(a, b, k, first, last, low, high, partial(memory));
      if (!shared) finish(lane, memory, 1);
    }
  });
  for (int64_t lane = 0; shared && lane < lanes; ++lane) finish(lane, shared + lane * parts * floats, parts);
  if (!a.after && a.New) append();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace diptych

XLA_FFI_DEFINE_HANDLER_SYMBOL(DiptychAttend, diptych::AttendCache,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int32_t>("layout")
                           .Attr<int32_t>("window")
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<float>("eps")
                           .Attr<int32_t>("after")
                           .Attr<int32_t>("rounded")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
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
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets());
