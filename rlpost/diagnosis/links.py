"""Names and ports of a node, and what two processes get through between them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlpost.cluster.node_network import use_node_network
from rlpost.diagnosis.report import Finding, Status
from rlpost.planner.quantities import GB, MIB

AREA = "network"
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0

# ---- names and ports -------------------------------------------------------------------------------------------------


def own_address() -> str:
    """This machine's address on the way out, as Ray finds it; the loopback address without a network. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 53))
        return str(probe.getsockname()[0])
    return LOOPBACK


def reach(host: str, port: int) -> str:
    """Connect and go away again; empty, or what went wrong."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:  # no such host, nobody there, no way, no such port
        return getattr(error, "strerror", None) or str(error)
    return ""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of a Ray address HOST:PORT; None of ``auto`` and the like."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def reach_itself(address: str) -> str:
    """Open a port at ``address`` and connect to it from here; empty, or what went wrong."""
    try:
        with socket.create_server((address, 0)) as server:
            return reach(address, server.getsockname()[1])
    except OSError as error:
        return error.strerror or str(error)


def check_port(name: str, address: str, problem: str) -> Finding:
    """``problem`` is what :func:`reach_itself` said of the address."""
    return Finding(
        area=AREA, name=name, status="failed" if problem else "ok",
        found=f"{address}: {problem or 'a port was opened there and reached'}", expected="a TCP port can be opened there and reached",
        fix="open the firewall for it, or give Ray another address: ray start --node-ip-address" if problem else "",
    )  # fmt: skip


def resolve(name: str) -> tuple[str, ...]:
    """Addresses that a host name stands for; none where it resolves to nothing."""
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)))
    return ()


def is_own(address: str) -> bool:
    """Whether a port can be opened at the address: it is one of this machine's."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((address, 0))
        return True
    return False


def check_hostname(name: str, found: Sequence[str], own: Iterable[bool], *, several_nodes: bool, card: str = "") -> Finding:
    """The host name should lead here: gloo by itself listens where it leads. ``own`` says of each address whether it is this machine's.

    A name that leads to the loopback address is of no use to other nodes. ``card`` (GLOO_SOCKET_IFNAME) takes the name's place. rlpost's
    own parts go by the node's address in Ray (cluster/node_network.py), so what is wrong here is for other programs: a warning.
    """
    foreign = [address for address, mine in zip(found, own, strict=True) if not mine]
    local = several_nodes and bool(found) and all(address.startswith("127.") for address in found)
    status: Status = "warning" if not card and (not found or foreign or local) else "ok"
    return Finding(
        area=AREA, name="host name", status=status,
        found=f"{name} is {', '.join(found) or 'not known'}" + (f"; GLOO_SOCKET_IFNAME={card}" if card else ""),
        expected="an address of this machine" + (" that other nodes reach" if several_nodes else ""),
        fix="" if status == "ok" else f"none for rlpost, which goes by Ray's addresses; for others correct {name} in /etc/hosts or DNS",
    )  # fmt: skip


def check_proxy(environment: Mapping[str, str], addresses: Iterable[str]) -> Finding:
    """A proxy that would get what is meant for the nodes themselves."""
    lower = {name.lower(): value for name, value in environment.items()}
    set_here = [name for name in ("http_proxy", "https_proxy", "all_proxy") if lower.get(name)]
    proxied = [address for address in addresses if not _left_out(address, lower.get("no_proxy", ""))]
    bad = bool(set_here and proxied)
    return Finding(
        area="environment", name="proxy", status="warning" if bad else "ok",
        found=f"{', '.join(set_here)} set" + (f", and no_proxy leaves out {', '.join(proxied)}" if bad else "") if set_here else "none",
        expected="no proxy, or no_proxy with the addresses of all nodes", fix=f"export no_proxy={','.join(proxied)}" if bad else "",
    )  # fmt: skip


def _left_out(address: str, no_proxy: str) -> bool:
    """Whether ``no_proxy`` names the address: itself, a network that it is in, or everything."""
    for entry in (part.strip() for part in no_proxy.split(",")):
        if entry in ("*", address):
            return True
        with contextlib.suppress(ValueError):  # a name, or half of an address
            if "/" in entry and ipaddress.ip_address(address) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


# ---- bandwidth -------------------------------------------------------------------------------------------------------

SIZE_BYTES = 64 * MIB
REPEATS = 3
EXPECTED_SHARE = 0.8
"""Below this share of what a plan counts with, its times do not hold."""


class LinkMember:
    """One of two ranks that measure what goes through between them; a Ray actor. torch comes up in its process only."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        use_node_network()
        self._backend, self._timeout_s = backend, timeout_s
        self._store: Any = None

    def load(self) -> None:
        """Bring torch up: seconds, or a minute on a slow disk, which no rendezvous has to wait for then."""
        import rlpost.weights.collective  # noqa: F401

    def serve(self) -> tuple[str, int]:
        """Open a rendezvous for this member and one other: its host and port."""
        import ray

        from rlpost.weights.collective import serve_store

        host = str(ray.util.get_node_ip_address())
        self._store = serve_store(host, 2, self._timeout_s)
        return host, int(self._store.port)

    def measure(self, rank: int, host: str, port: int) -> dict[str, float]:
        """Meet the other member (rank 0 has served), then all-reduce and broadcast some times: least seconds of each."""
        import torch

        from rlpost.weights.collective import join_store, make_group, start_broadcast

        store = self._store if rank == 0 else join_store(host, port, 2, self._timeout_s)
        group = make_group(store, backend=self._backend, rank=rank, world=2, timeout_s=self._timeout_s)
        device = torch.device("cuda", 0) if self._backend == "nccl" else torch.device("cpu")  # nccl: not run on a GPU yet
        buffer = torch.ones(SIZE_BYTES // 4, device=device)
        starts = {"all_reduce": lambda: group.allreduce([buffer]), "broadcast": lambda: start_broadcast(group, buffer)}
        seconds: dict[str, float] = {}
        for name, start in starts.items():
            taken = []
            for _ in range(1 + REPEATS):  # the first one makes the connections
                group.barrier().wait()
                started = time.perf_counter()
                start().wait()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                taken.append(time.perf_counter() - started)
            seconds[name] = min(taken[1:])
        return seconds


def bus_bandwidth(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Bus bandwidth in bytes/s of each operation, by the slower of two ranks (nccl-tests, doc/PERFORMANCE.md).

    An all-reduce counts 2 (n - 1) / n times its size and a broadcast once: with two ranks both count the size.
    """
    return {name: SIZE_BYTES / max(one[name] for one in seconds) for name in seconds[0]}


def check_bandwidth(names: tuple[str, str], backend: str, bandwidth: Mapping[str, float], expected_gb_s: float | None) -> Iterator[Finding]:
    """One finding an operation, between two nodes (or twice the same), against what a plan counts with."""
    between = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"two processes on {names[0]}"
    expected = f"{EXPECTED_SHARE:.0%} of {expected_gb_s:g} GB/s (--expect-gb-s)" if expected_gb_s else "measured; no figure was expected"
    fix = "look which card is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA), or plan with the measured figure"
    for name, bytes_s in bandwidth.items():
        slow = expected_gb_s is not None and bytes_s < EXPECTED_SHARE * expected_gb_s * GB
        yield Finding(
            area="bandwidth", name=name.replace("_", "-"), status="failed" if slow else "ok",
            found=f"{bytes_s / GB:.3g} GB/s bus bandwidth over {backend}, {SIZE_BYTES // MIB} MiB, between {between}",
            expected=expected, fix=fix if slow else "", where=names[0], values={f"{name}_bytes_s": bytes_s},
        )  # fmt: skip
