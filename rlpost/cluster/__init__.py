"""The Ray side of a run: the session, and resources that are granted all at once or not at all.

session.py     connect to a cluster or start one here
references.py  Ray's references in asyncio
placement.py   one placement group for all parts of the run, checked before it is asked for
"""
