"""The page of a plan: well-formed, alone in the world, with drawings that show the plan's numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from rlpost.config.load import load_config
from rlpost.planner.advice import Advice
from rlpost.planner.figures import COLOURS, LEFT, delta_curve, full_curve, memory_figure, reached
from rlpost.planner.html import plan_to_html
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import Plan, make_plan
from rlpost.planner.roles import PHASES
from rlpost.planner.svg import Scale, figure, log_scale, text
from rlpost.planner.tables import digits, gib


class Page(HTMLParser):
    """All elements with their attributes and own text; fails for one that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.elements.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.elements[-1][2].append(data)

    def having(self, tag: str, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = {name.strip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = [(given, "".join(text).strip()) for name, given, text in self.elements if name == tag]
        return [(given, text) for given, text in found if all(given.get(name) == value for name, value in wanted.items())]


def plan_of(*words: str, **options: Any) -> Plan:
    return make_plan(load_config(words).config, PlanOptions(**options))


@pytest.fixture(scope="module")
def qwen() -> Plan:
    return plan_of("config=grpo_qwen", hardware="h100-8", price=2.5)


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return plan_of("config=grpo_tiny")


def test_page_is_balanced_and_every_id_is_there_once(qwen: Plan, tiny: Plan) -> None:
    for plan in (qwen, tiny, plan_of("config=dpo_tiny")):
        page = Page(plan_to_html(plan))
        ids = [given["id"] for _, given, _ in page.elements if "id" in given]
        assert len(ids) == len(set(ids))
        for given, _ in page.having("svg"):
            assert given["role"] == "img" and set((given["aria-labelledby"] or "").split()) <= set(ids)


def test_page_has_bars_of_every_process_and_the_curves(qwen: Plan, tiny: Plan) -> None:
    ids = [given.get("id") for given, _ in Page(plan_to_html(qwen)).having("figure")]
    assert ids == ["memory0", "memory1", "time", "split", "sync"]
    ids = [given.get("id") for given, _ in Page(plan_to_html(tiny)).having("figure")]
    assert ids == ["memory0", "memory1", "time", "sync"]  # on CPU there is nothing to split


def test_nothing_is_loaded_from_anywhere(qwen: Plan) -> None:
    written = plan_to_html(qwen)
    page = Page(written)
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base"} & {tag for tag, _, _ in page.elements}
    for _, given, _ in page.elements:
        assert not {"src", "href", "xlink:href", "srcset", "style", "action", "data"} & set(given)
        assert not [name for name in given if name.startswith("on")]
        assert not [value for name, value in given.items() if name != "xmlns" and value and "//" in value]
    assert "url(" not in written and "@import" not in written
    assert set(re.findall(r"https?://[^\"' <]*", written)) == {"http://www.w3.org/2000/svg"}


def test_names_of_the_user_are_shown_and_not_run(tiny: Plan) -> None:
    hostile = "<script>alert(1)</script>\"'&<b x='"
    plan = replace(tiny, name=hostile, shape=replace(tiny.shape, name=hostile), warnings=(hostile,))
    advice = Advice(fits=False, changes=(hostile,), cost=hostile, fits_with_changes=True, notes=(hostile,))
    page = Page(plan_to_html(plan, advice=advice))
    assert not page.having("script") and not page.having("b")
    assert page.having("h1")[0][1] == f"Plan of {hostile}"
    assert [words for _, words in page.having("p", class_="warning")] == [f"warning: {hostile}"]


def test_tables_of_the_page_hold_the_numbers_of_the_plan(qwen: Plan) -> None:
    assert qwen.sync is not None and qwen.split is not None
    shown = [words for _, words in Page(plan_to_html(qwen)).having("td")]
    for process in qwen.memory.processes:
        assert {gib(process.phase_bytes(phase)) for phase in PHASES} <= set(shown)
    assert {digits(value) for value in qwen.sync.seconds.values()} <= set(shown)
    assert {one.formula for phase in qwen.step.phases for one in phase.works} <= set(shown)
    assert {digits(qwen.split.best.step_s), "best", "present"} <= set(shown)


def test_words_of_a_drawing_are_escaped() -> None:
    drawing = figure("one", "<b>", "<i>", 10, [text(0, 0, "<u>")])
    assert [tag for tag, _, _ in Page(drawing).elements] == ["figure", "figcaption", "svg", "title", "desc", "text"]


# ---- drawings --------------------------------------------------------------------------------------------------------


def rows_of(plan: Plan, number: int) -> tuple[dict[str, float], float | None]:
    """Width of each phase's bar, and of the capacity, in the drawing's units."""
    process = plan.memory.processes[number]
    page = Page(memory_figure(process, plan.calibration, 0, shared=plan.memory.shared_bytes if plan.memory.shared else None))
    bars = [given for given, _ in page.having("rect") if given["height"] == "22"]
    tops = sorted({float(str(given["y"])) for given in bars})
    widths = [sum(float(str(given["width"])) for given in bars if float(str(given["y"])) == top) for top in tops]
    limit = page.having("line", class_="limit")
    return dict(zip(PHASES, widths, strict=True)), float(str(limit[0][0]["x1"])) - LEFT if limit else None


def test_bars_are_as_long_as_the_memory_beside_the_capacity(qwen: Plan) -> None:
    for number, process in enumerate(qwen.memory.processes):
        widths, limit = rows_of(qwen, number)
        assert limit is not None
        for phase in PHASES:
            assert widths[phase] / limit == pytest.approx(process.phase_bytes(phase) / process.capacity_bytes, abs=2e-3)


def test_a_capacity_far_beyond_the_bars_is_written_and_not_drawn(tiny: Plan) -> None:
    huge = replace(tiny, memory=replace(tiny.memory, shared_bytes=1e12))
    widths, limit = rows_of(huge, 0)
    assert limit is None and max(widths.values()) > 500  # of 860: no slivers
    assert f"capacity of all processes together: {gib(1e12)} GiB (beyond the scale)" in plan_to_html(huge)


def test_sync_curves_meet_the_plan_at_its_bandwidth_and_cross_at_break_even(qwen: Plan) -> None:
    sync, carrier = qwen.sync, qwen.derived.weight_carrier
    assert sync is not None and sync.break_even_bytes_per_second is not None
    full, delta, present = (one(sync, carrier, qwen.calibration) for one in (full_curve, delta_curve, reached))
    assert callable(full) and callable(delta) and isinstance(present, float)
    assert full(present / 1e9) == pytest.approx(sync.seconds[carrier])
    even = sync.break_even_bytes_per_second / 1e9
    assert full(even) == pytest.approx(delta(even))
    assert delta(even / 10) < full(even / 10) and delta(even * 10) > full(even * 10)


def test_adapters_have_no_delta_curve_and_the_page_is_made() -> None:
    plan = plan_of("config=grpo_tiny_lora", "training.lora.sync=adapter")
    assert plan.sync is not None and delta_curve(plan.sync, plan.derived.weight_carrier, plan.calibration) is None
    assert "as a delta</text>" not in plan_to_html(plan)


def test_split_curve_marks_best_and_present(qwen: Plan) -> None:
    assert qwen.split is not None
    page = Page(plan_to_html(qwen))
    marks = sorted(float(str(given["cx"])) for given, _ in page.having("circle", class_="mark"))
    scale = Scale(low=0.5, high=7.5, start=LEFT, end=800)
    assert marks == pytest.approx(sorted([scale.at(qwen.split.present[1]), scale.at(qwen.split.best.rollout_gpus)]), abs=0.01)


def luminance(colour: str) -> float:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def test_neighbouring_colours_differ_in_lightness_and_none_comes_twice() -> None:
    assert len(set(COLOURS)) == len(COLOURS)
    for first, second in pairwise((*COLOURS, COLOURS[0])):
        bright, dark = max(luminance(first), luminance(second)), min(luminance(first), luminance(second))
        assert (bright + 0.05) / (dark + 0.05) > 1.8, (first, second)


@pytest.mark.parametrize(("low", "high"), [(0.0, 79.0), (0.02, 0.021), (3.0, 900.0), (1e-3, 1e5)])
@pytest.mark.parametrize("log", [False, True])
def test_a_scale_has_ticks_in_it_and_in_order(low: float, high: float, log: bool) -> None:
    scale = Scale(low=low or 0.1, high=high, start=300, end=10, log=log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 14 and ticks == sorted(ticks)
    places = [scale.at(tick) for tick in ticks]
    assert all(10 - 1e-6 <= place <= 300 + 1e-6 for place in places) and places == sorted(places, reverse=True)


def test_a_scale_of_equal_values_has_room() -> None:
    scale = log_scale([2.0, 2.0], 0, 100)
    assert scale.low < 2.0 < scale.high and 0 < scale.at(2.0) < 100
