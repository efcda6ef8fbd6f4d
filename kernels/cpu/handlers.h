// The handlers, which XLA calls, and what they share.
#pragma once

#include <string>

#include "attention.h"
#include "matmul.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(DiptychMatmul);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DiptychAttend);

namespace diptych {

const MatmulKernels& Matmuls();  // for the instruction set of this machine
const AttentionKernels& Attentions();

inline xla::ffi::Error Wrong(const std::string& what) { return xla::ffi::Error::InvalidArgument("diptych kernels: " + what); }

}  // namespace diptych
