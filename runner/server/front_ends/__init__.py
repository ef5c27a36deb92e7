"""Front ends on other hosts: HTTP there, the replicas here.

placing.py         a process that has Ray place an agent on each node, and hands its connection to the owner
agent.py           the actor on a node, which forks the front end
owner.py           the owner's side: admits the requests of all front ends, and sends the tokens
process.py         a front end
joined_engine.py   what a front end has in place of an engine
joined_service.py  its service, which leaves admission to the owner, and the paths that only the owner answers
"""
