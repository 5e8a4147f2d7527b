"""The network that process groups use: the one of this node's address in Ray, by which the nodes reach one another already."""

from __future__ import annotations

import os
import sys

GLOO_CARD = "GLOO_SOCKET_IFNAME"
VLLM_ADDRESS = "VLLM_HOST_IP"


def use_node_network() -> None:
    """In an actor, before its first process group: let gloo and vLLM bind to this node's address in Ray.

    By themselves they go by the host's name and by the default route, which lead to the loopback address, to another network or to
    nothing on many nodes. What the environment says already stays as it is. Does nothing where no Ray runs (tests).
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    address = str(ray.util.get_node_ip_address())
    os.environ.setdefault(VLLM_ADDRESS, address)
    card = card_of(address)
    if card is not None:
        os.environ.setdefault(GLOO_CARD, card)


def card_of(address: str) -> str | None:
    """The network card that holds ``address``; None when none does, as with an address that is translated on the way (NAT)."""
    import psutil  # comes with Ray

    cards = psutil.net_if_addrs().items()
    return next((card for card, held in cards if any(one.address.partition("%")[0] == address for one in held)), None)
