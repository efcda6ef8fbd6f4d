"""What XLA's GPU compiler must be told of a GPU that is not there: the text of a `GpuTargetConfigProto`, from NVIDIA's data sheets."""

_CUDA, _CUDNN = "12.9.0", (9, 10, 0)
H200 = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
gpu_device_info {{
  name: "NVIDIA H200"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "{_CUDA}" runtime_version: "{_CUDA}" compile_time_toolkit_version: "{_CUDA}" dnn_version: "{".".join(map(str, _CUDNN))}"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 141000000000 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_interconnect_info {{ active_links: 18 }}
}}
"""
