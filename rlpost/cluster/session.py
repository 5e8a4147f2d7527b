"""Connect to a Ray cluster, or start one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray

from rlpost.types import ConfigError, InfrastructureError

OBJECT_STORE_BYTES = 512 << 20
"""Object store of a local session: batches are megabytes, weights do not travel through it."""

PROBE_TIMEOUT_S = 10.0
"""A cluster that listens takes a connection at once; Ray itself would try for minutes, saying nothing."""

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""Environment of actors that compute on a CPU: glibc gives large tensors back to the system at every free and gets them page by page
again, a tenth of a trainer's time. 32 MiB is the largest threshold that it takes. Its caches of small pieces are off: such pieces between
tensors keep freed neighbours apart, and a trainer's peak is 10 to 25 % higher with them."""


def connect(address: str | None) -> dict[str, Any]:
    """Join the cluster at ``address`` (or RAY_ADDRESS), else start Ray here. Returns what to print about it.

    Raises ConfigError when an address was given and nothing answers there, InfrastructureError when Ray cannot start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray warns at length about accelerator variables that are empty on purpose.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS") or None
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True, "namespace": "rlpost"}
    if address is None:
        try:
            ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **common)
        except Exception as error:  # Ray raises a bare Exception when one of its processes does not come up
            raise InfrastructureError(
                f"Ray did not start on this machine: {error} Is the machine overloaded, or its disk full? "
                "Ray's own logs are in /tmp/ray/session_latest/logs"
            ) from error
        return {"where": "this machine", "resources": ray.cluster_resources()}
    try:
        _probe(address)
        ray.init(address=address, **common)
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"the Ray cluster at {address!r} does not take this driver: {error}; use the same versions of Python and Ray here as there, "
            "and RAY_AUTH_MODE=token with the head's token where it has one"
        ) from error
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} (placement.ray_address or RAY_ADDRESS): {error}; start one there with "
            "`ray start --head`, correct the address, set RAY_AUTH_MODE=token when the head has a token (~/.ray/auth_token), or leave it "
            "out to start Ray on this machine"
        ) from error
    return {"where": address, "resources": ray.cluster_resources()}


def _probe(address: str) -> None:
    """Raise ConnectionError when ``address`` is HOST:PORT and nobody listens there; ``auto`` and the like are for Ray to find."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:  # no such host, nobody there, no way, no such port
        raise ConnectionError(str(error)) from error


def disconnect() -> None:
    """Leave the cluster; a local one ends."""
    ray.shutdown()
