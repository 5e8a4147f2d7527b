"""Which network card process groups are bound to."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.cluster.node_network import GLOO_CARD, VLLM_ADDRESS, card_of, use_node_network

OF_NO_CARD = "192.0.2.77"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO_CARD, VLLM_ADDRESS):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def in_ray(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    ray: Any = SimpleNamespace(is_initialized=lambda: True, util=SimpleNamespace(get_node_ip_address=lambda: address))
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_groups_are_bound_to_the_card_that_has_the_nodes_address_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    in_ray(monkeypatch, "127.0.0.1")
    use_node_network()
    assert os.environ[GLOO_CARD] == "lo" and os.environ[VLLM_ADDRESS] == "127.0.0.1"


def test_a_card_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    in_ray(monkeypatch, "127.0.0.1")
    monkeypatch.setenv(GLOO_CARD, "ib0")
    monkeypatch.setenv(VLLM_ADDRESS, "10.0.0.5")
    use_node_network()
    assert (os.environ[GLOO_CARD], os.environ[VLLM_ADDRESS]) == ("ib0", "10.0.0.5")


def test_an_address_that_no_card_holds_leaves_the_choice_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    in_ray(monkeypatch, OF_NO_CARD)
    use_node_network()
    assert card_of(OF_NO_CARD) is None and GLOO_CARD not in os.environ


def test_nothing_is_set_where_no_ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    use_node_network()
    assert GLOO_CARD not in os.environ and VLLM_ADDRESS not in os.environ
