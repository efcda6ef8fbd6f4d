"""A TPU's compiler without a TPU."""

import os

import jax
import pytest


@pytest.fixture(scope="session")
def chip():
    """One v5e chip's worth of compiler."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another test process may hold the library
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1])
    return jax.sharding.SingleDeviceSharding(topology.devices[0])
