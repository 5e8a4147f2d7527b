"""What README and docs/ name is there: links, files, tests, modules and settings; and the example environment plays an episode."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.config.fields import find_field
from rlpost.config.load import find_config, load_config
from rlpost.config.schema import EnvironmentConfig
from rlpost.environments.catalogue import environment_factory
from rlpost.rollout.episode import EpisodeLimits, run_episode
from rlpost.types import GenerateRequest, GenerateResult, Prompt, SamplingSettings, Trajectory

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")])
SECTIONS = (
    "model|data|environment|reward_runner|algorithm|sampling|schedule|training|engine|weights|placement|evaluation|checkpoint|observe"
)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def headings_of(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*#?[^)\s]*)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in headings_of(path), f"{page.name} links to {target}"


@pages
def test_files_that_are_named_are_there(page: Path) -> None:
    """Test files above all: a promise names the test that keeps it."""
    for name in re.findall(r"`((?:rlpost|tests|configs|examples|benchmarks|requirements)/[\w./-]+\.\w+)(?::\w+)?`", page.read_text()):
        assert (PROJECT / name).exists(), f"{page.name} names {name}"


@pages
def test_modules_that_are_run_are_there(page: Path) -> None:
    for module in re.findall(r"python -m (rlpost[\w.]*|benchmarks[\w.]*)", page.read_text()):
        path = PROJECT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} runs {module}"


@pages
def test_settings_and_configs_that_are_named_exist(page: Path) -> None:
    """Every ``section.key`` in code spans, and each override and config of a command."""
    text = page.read_text()
    spans = re.findall(r"`([^`\n]+)`", text) + [line for line in text.splitlines() if "rlpost.train" in line]
    for span in spans:
        if "unknown key" in span:
            continue
        for key in re.findall(rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z_]+)+)(?![\w./]*(?:\.py|\())(?!\*)", span):
            assert find_field(key) is not None, f"{page.name}: {key} is no setting (in `{span}`)"
    for line in (line for line in text.splitlines() if "python -m rlpost.train" in line):
        for name in re.findall(r"config=([a-z]\w*)(?=\s|$|`)", line):
            find_config(name)


# ---- the example environment -----------------------------------------------------------------------------------------


class Codec:
    """One token a character; token 1 ends a turn."""

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in tokens if token > 1)

    def encode_text(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_turn(self, messages: Any) -> list[int]:
        return self.encode_text("|".join(message["content"] for message in messages))


def play(guesses: list[str], **options: Any) -> Trajectory:
    """One episode of examples/environments/guess_word.py, for the word grape, with these turns."""
    turns = iter(guesses)

    async def generate(request: GenerateRequest) -> GenerateResult:
        tokens = np.array([*map(ord, next(turns)), 1])
        return GenerateResult(
            request_id=request.request_id, tokens=tokens, logprobs=np.zeros(len(tokens)), versions=np.zeros(len(tokens), int),
            finish_reason="stop", prompt_tokens=len(request.tokens), cached_tokens=0,
        )  # fmt: skip

    name = f"{PROJECT}/examples/environments/guess_word.py:GuessWord"
    prompt = Prompt(prompt_id="0", text="fruit: ", fields={"word": "grape"}, tokens=np.array([ord("x")]))
    episode = run_episode(
        prompt=prompt, group_id="0", sample=0, seed=1, generate=generate, codec=Codec(), sampling=SamplingSettings(),
        make_environment=environment_factory(EnvironmentConfig(name=name, options=options)),
        limits=EpisodeLimits(max_turns=3, max_total_tokens=1000, environment_timeout_s=5.0),
    )  # fmt: skip
    return asyncio.run(episode)


def test_example_environment_pays_the_word_in_full_and_near_misses_in_part() -> None:
    solved = play(["grasp", "Grape"])
    assert (solved.reward, solved.turns, solved.truncated) == (pytest.approx(1.0), 2, False)
    assert solved.completion == "graspgra__\nGrape"
    missed = play(["grasp", "zzzzz", "grass"], partial_credit=0.5)
    assert (missed.reward, missed.turns, missed.truncated) == (pytest.approx(0.3), 3, True)


def test_example_environment_answers_as_chat_messages() -> None:
    assert play(["apple", "grape"], chat=True).completion == "apple____egrape"


def test_example_config_is_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    config = load_config(["config=examples/environments/guess_word.yaml"]).config
    assert Path(config.data.train).is_file()
    environment_factory(config.environment)
