"""Configuration: strict, documented, and checked as a whole before Ray starts.

What comes in: the command line's ``config=NAME key=value ...``. What goes out: a ``schema.RunConfig`` with no key unknown, no type
wrong and no value missing (``load.load_config``), whose settings work together (``checks.check``), and what follows
from it (``derive.derive``). Every user error is a :class:`~rlpost.types.ConfigError`. Nothing here imports torch, ray or vllm.

    schema.py       every setting, documented
    fields.py       reflection over the schema: known keys, types, nearest key
    yaml_source.py  YAML files and scalars as configs mean them
    load.py         lookup, `base:` chains, overrides, the typed object
    inputs.py       model, data and files that a config names
    checks.py       settings that cannot work together
    derive.py       resolved `auto` values, sizes, placement
    help.py         `--help`

Import from the modules: this file imports nothing, so that a worker which needs only the schema loads only that.
"""
