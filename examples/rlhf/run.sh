#!/usr/bin/env bash
# The RLHF chain on the embedded task: supervised fine-tuning, a reward model, PPO with it. Minutes on two CPU cores, no download.
# Usage: examples/rlhf/run.sh [DIRECTORY]   (from the repository's root, with the environment's python first in PATH; default: runs/rlhf)
set -euo pipefail
root=${1:-runs/rlhf}

python -m rlpost.train config=sft_tiny run_dir="$root/sft" schedule.steps=20 training.optimizer.lr=3e-4
python -m rlpost.checkpoint export "$root/sft" --to "$root/sft-model"

python -m rlpost.train config=reward_model_tiny run_dir="$root/reward" model.path="$root/sft-model" schedule.steps=200
python -m rlpost.checkpoint export "$root/reward" --to "$root/reward-model"

# exact_match has no weight: it only shows whether what the reward model likes is right. The KL holds the policy where the reward model knows its way.
python -m rlpost.train config=ppo_tiny run_dir="$root/ppo" model.path="$root/sft-model" training.ranks=1 schedule.steps=60 \
    "rewards=[{model: $root/reward-model, name: judge}, {function: exact_match, weight: 0}]" \
    algorithm.critic.path="$root/reward-model" algorithm.kl_coefficient=0.3 algorithm.kl_in=reward algorithm.kl_estimator=k1 \
    training.optimizer.lr=5e-4
python -m rlpost.report "$root/ppo"
