"""What stands between the model's turns: the episode protocol and the environments that come with rlpost.

    protocol.py     reset / step, what they return, and how a user's class is called
    single_turn.py  one answer, no environment
    calc.py         a tool call and its observation between the turns
    catalogue.py    name -> class; a user's own by `package.module:Class` or `file.py:Class`

An environment is made for each episode (options from the configuration), gets text and gives text; it never sees tokens.
"""
