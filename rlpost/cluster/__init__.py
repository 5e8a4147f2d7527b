"""The Ray side of a run: the session, and resources that are granted all at once or not at all.

session.py        connect to a cluster or start one here
references.py     Ray's references in asyncio
layout.py         which node takes which bundle, role by role, and the table of it
placement.py      one placement group for all parts of the run: refused, waited for, granted
holders.py        who else holds the resources
actor_process.py  an actor's directory and output
node_network.py   which network card process groups use
"""
