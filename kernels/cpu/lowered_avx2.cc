#include <cfloat>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "matmul.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "avx2.h"
namespace diptych::avx2 {
#include "activations.inc"
#include "matmul.inc"
#include "attention_block.inc"
#include "attention.inc"
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace diptych {
const MatmulKernels kMatmulAvx2 = {avx2::prepare_rows, avx2::multiply};
const AttentionKernels kAttentionAvx2 = {avx2::append, avx2::answer};
}  // namespace diptych
