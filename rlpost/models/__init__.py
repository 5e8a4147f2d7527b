"""Models that rlpost can make or fetch by itself, so that a first run needs no model hub.

In: a name (`python -m rlpost.models list` prints them). Out: a Hugging Face directory in the cache, which
``transformers`` and vLLM load like any other. A directory is complete or absent: each is written beside its
place and renamed.

- ``embedded.py``  the tiny models of the embedded tasks: built and warm-started by our own code.
- ``smollm2.py``   SmolLM2-135M-Instruct, a real pre-trained model, converted from a PyPI package.
- ``gguf.py``      the reader of that package's file format.
"""
