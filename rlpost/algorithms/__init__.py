"""Algorithms as pure functions and small classes; nothing here knows Ray, vLLM or the trainer.

protocol.py     what the driver asks of an algorithm
online.py       policy gradients: what a sample is worth, what the loss is made of     (numpy)
offline.py      losses over data sets                                                  (numpy)
advantages.py   rewards -> advantages         shaping.py      rewards before that      (numpy)
aggregation.py  what the loss is a mean of -> token weights and the global denominator (numpy)
estimators.py   estimators of a KL, and a coefficient that is steered                  (numpy)
losses.py       terms, their weights and denominators -> the loss                      (torch)
policy.py, kl.py, value.py, preference.py, correction.py   the terms                   (torch)
catalogue.py    name -> algorithm, name -> term; a new one is one file and one line there
"""
