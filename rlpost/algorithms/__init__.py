"""Algorithms as pure functions and small classes; nothing here knows Ray, vLLM or the trainer.

advantages.py   rewards of a group -> advantage of each sample (numpy)
aggregation.py  what the loss is a mean of -> token weights and the global denominator (numpy)
losses.py       per-token loss terms (torch), named; the trainer sums weight * term / denominator
grpo.py         the GRPO class: puts the three together; a new algorithm is one such file
catalogue.py    name -> class
"""
