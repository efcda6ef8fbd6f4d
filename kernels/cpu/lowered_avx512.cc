#include <cfloat>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "matmul.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
#include "avx512.h"
namespace diptych::avx512 {
#include "activations.inc"
#include "matmul.inc"
#include "attention_block.inc"
#include "attention_pairs.inc"
#include "attention.inc"
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace diptych {
const MatmulKernels kMatmulAvx512 = {avx512::prepare_rows, avx512::multiply};
const AttentionKernels kAttentionAvx512 = {avx512::append, avx512::answer};
}  // namespace diptych
