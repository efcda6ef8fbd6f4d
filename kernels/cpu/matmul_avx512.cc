#include <type_traits>

#include "attention.h"
#include "matmul.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include "avx512.h"
namespace diptych::avx512 {
#include "matmul.inc"
#include "attention.inc"
}
#pragma GCC pop_options

namespace diptych {
const MatmulKernels kMatmulAvx512 = {avx512::prepare_rows, avx512::multiply};
const AttentionKernels kAttentionAvx512 = {avx512::append, avx512::answer};
}  // namespace diptych
