"""From a data set on disk to prompts in tokens, in an order that a resume can continue.

    load.py        .jsonl, .parquet, a Hugging Face data set or an embedded task -> list of Prompt (text or messages)
    tokenizer.py   the only place where text becomes tokens and tokens become text
    prepare.py     Prompt -> Prompt with ``tokens``; prompts over the limit are dropped and counted, or refused
    cursor.py      the endless, seeded, resumable stream of prompt indices
    answers.py     a row of an offline set -> prompt and answers, as text or conversations, with the turns that are trained
    offline.py     those -> OfflineRow: tokens, and the mask of what is trained; rows over the limit are dropped and counted, or refused

Comes in: ``data.*`` and ``model.*`` of the configuration. Goes out: prompts with tokens, and indices into them.

Guaranteed: a row that cannot be used is an error that names its file and line (:class:`rlpost.types.ConfigError`, before Ray
starts); prompt ids are unique; a prompt is tokenised once; the order depends on the seed and the epoch alone. Nothing
here imports torch, Ray or vLLM; transformers is imported by ``tokenizer.py`` when a tokenizer is loaded, ``datasets``
and pyarrow when such data is read.
"""
