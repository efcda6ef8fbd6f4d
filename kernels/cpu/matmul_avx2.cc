#include <type_traits>

#include "attention.h"
#include "matmul.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "avx2.h"
namespace diptych::avx2 {
#include "matmul.inc"
#include "attention.inc"
}
#pragma GCC pop_options

namespace diptych {
const MatmulKernels kMatmulAvx2 = {avx2::prepare_rows, avx2::multiply};
const AttentionKernels kAttentionAvx2 = {avx2::append, avx2::answer};
}  // namespace diptych
